"""Tiers of the suite: `make test` folds the largest matrices, and `make campaigns` runs what it leaves out.

``tests/campaigns/guards.toml`` names the groups. ``pytest --tier push`` leaves out what a group folds,
``--tier campaigns`` runs nothing else, and ``--campaign GROUP`` adds a group to a push, or selects it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

__all__ = ["GUARDS", "Group", "Tiers", "add_options", "folding_group", "read_groups", "scope_of"]

GUARDS = Path(__file__).parents[1] / "campaigns" / "guards.toml"
TIERS = ("all", "push", "campaigns")


@dataclass(frozen=True)
class Group:
    """Tests that a push folds to a part of them.

    Attributes:
        name: what `make campaigns GROUP=...` calls it.
        subject: noun phrase for tables and messages.
        tests: ids, or beginnings of ids that end with a folder, a file, a class or a function.
        push: beginnings of names (``test_c9_``, ``TestDeepSpeed3::``) of the tests that a push runs, too.
        guards: globs of files; a change of one of them makes a push run the whole group.
        target: make target that runs it; None for a group of `make test`'s own collection.
    """

    name: str
    subject: str
    tests: tuple[str, ...]
    guards: tuple[str, ...]
    push: tuple[str, ...] = ()
    target: str | None = None

    def contains(self, test_id: str) -> bool:
        """Whether the test belongs to this group, folded or not."""
        return any(re.match(rf"{re.escape(part)}($|[/:\[])", test_id) for part in self.tests)

    def folds(self, test_id: str) -> bool:
        """Whether a push leaves the test out."""
        if not self.contains(test_id):
            return False
        name = test_id.partition("::")[2]
        return not any(begins.startswith(self.push) for begins in (name, _function_of(name)))

    def is_guarded_by(self, file: str) -> bool:
        """Whether a change of `file` chooses this group; its own tests count."""
        own = any(part.partition("::")[0] == file or file.startswith(f"{part}/") for part in self.tests)
        return own or any(fnmatchcase(file, glob) for glob in self.guards)


def _function_of(name: str) -> str:
    """``test_x[a::b]`` of ``TestClass::test_x[a::b]``."""
    head, bracket, parameters = name.partition("[")
    return head.rpartition("::")[2] + bracket + parameters


def read_groups(path: Path = GUARDS) -> dict[str, Group]:
    """Groups by name, in the order of the file; the guards of ``[every]`` belong to all of them."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    every = tuple(tables.pop("every", {}).get("guards", ()))
    return {name: _group(name, table, every) for name, table in tables.items()}


def _group(name: str, table: Mapping[str, object], every: tuple[str, ...]) -> Group:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Group(name, **{**fields, "guards": (*every, *fields["guards"])})  # type: ignore[arg-type, misc]


def folding_group(test_id: str, groups: Iterable[Group]) -> Group | None:
    """The group for which a push leaves the test out; None if a push runs it.

    Raises:
        ValueError: two groups contain the test.
    """
    found = [group for group in groups if group.contains(test_id)]
    if len(found) > 1:
        raise ValueError(f"{test_id} is in several groups: {', '.join(group.name for group in found)}")
    return found[0] if found and found[0].folds(test_id) else None


def scope_of(test_id: str) -> str:
    """File or class whose tests run in one process, as ``--dist loadscope`` divides them."""
    return test_id.partition("[")[0].rpartition("::")[0]


def add_options(parser: pytest.Parser) -> None:
    """Add ``--tier`` and ``--campaign``."""
    parser.addoption("--tier", choices=TIERS, default="all", help="Part of the suite: see tests/campaigns.")
    parser.addoption(
        "--campaign", action="append", default=[], metavar="NAME", help="A group of guards.toml."
    )


class Tiers:
    """Select the tests of the tier that was asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.groups = read_groups()
        self.tier: str = config.getoption("--tier")
        self.chosen: list[str] = config.getoption("--campaign")
        unknown = [name for name in self.chosen if name not in self.groups]
        if unknown:
            raise pytest.UsageError(
                f"--campaign {unknown[0]}: no such group. Groups: {', '.join(self.groups)}"
            )

    def runs(self, test_id: str) -> bool:
        """Whether the tier contains the test."""
        if self.tier == "all":
            return True
        group = folding_group(test_id, self.groups.values())
        if group is None:
            return self.tier == "push"
        return group.name in self.chosen or (self.tier == "campaigns" and not self.chosen)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = {item for item in items if not self.runs(item.nodeid)}
        if left_out:
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=list(left_out))
