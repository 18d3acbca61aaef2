"""Checks of a YAML file before it becomes values.

YAML's own reader keeps the last of two equal keys, and a few aliases can stand for billions of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

__all__ = ["MAX_VALUES", "Duplicate", "count_values", "find_duplicate"]

MAX_VALUES = 100_000
"""Values of a configuration at most, those behind aliases counted each time."""

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


def count_values(root: Node) -> int:
    """The number of values that `root` stands for, aliases expanded, up to ``MAX_VALUES + 1``.

    Raises:
        ValueError: an alias is part of what it stands for.
    """
    return _count(root, {})


def _count(node: Node, known: dict[int, int | None]) -> int:
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise ValueError("an alias is part of what it stands for")
        return found
    known[id(node)] = None
    parts: list[Node] = []
    if isinstance(node, SequenceNode):
        parts = node.value
    elif isinstance(node, MappingNode):
        parts = [part for pair in node.value for part in pair]
    total = min(1 + sum(_count(part, known) for part in parts), MAX_VALUES + 1)
    known[id(node)] = total
    return total
