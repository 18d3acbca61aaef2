"""Find keys that a YAML file sets twice; YAML's own reader keeps the last one and drops the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

__all__ = ["Duplicate", "find_duplicate"]

_MERGE = "tag:yaml.org,2002:merge"


class Duplicate(NamedTuple):
    """A key that is set twice.

    Attributes:
        name: dotted name of the key.
        first: line of its first occurrence, from 1.
        second: line of its second occurrence.
    """

    name: str
    first: int
    second: int


def find_duplicate(root: Node) -> Duplicate | None:
    """The first key below `root` that is set twice, written nested or dotted; None without one."""
    lines: dict[str, int] = {}
    for name, line in _keys(root, "", set()):
        if name in lines:
            return Duplicate(name, lines[name], line)
        lines[name] = line
    return None


def _keys(node: Node, prefix: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every key, in file order; a node with several aliases is read once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            yield from _keys(item, f"{prefix}{number}.", seen)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.tag != _MERGE:
                name = f"{prefix}{key.value}"
                yield name, key.start_mark.line + 1
                yield from _keys(value, f"{name}.", seen)
