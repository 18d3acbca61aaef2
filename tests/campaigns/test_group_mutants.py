"""A change that a push's part of a group passes is found by the group, which the change chooses."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import ClassVar

import pytest

from tests.campaigns.choose import reasons
from tests.campaigns.last_green import GroupResult, LastGreen
from tests.campaigns.reversions.group_mutants import GROUP_MUTANTS, PREFIX
from tests.campaigns.reversions.run import FAILED, NONE, PASSED, run_under
from tests.support.tiers import read_groups

ROOT = Path(__file__).parents[2]
GROUPS = read_groups()
SECONDS = 600
"""Limit of one pytest under a fault."""


def test_every_group_has_a_mutant() -> None:
    # The group of this file would run itself.
    assert set(GROUP_MUTANTS) == set(GROUPS) - {"group-mutants"}


class _OfGroup:
    """The tests of one group's fault; a class for each, so that workers share them."""

    name: ClassVar[str]

    def test_a_changed_file_chooses_the_group_that_finds_it(self) -> None:
        group, fault = GROUPS[self.name], GROUP_MUTANTS[self.name]
        file = fault.file
        last = LastGreen("0" * 40, "2026-01-01", {self.name: GroupResult(1, 1.0)})
        assert reasons([group], last, lambda commit: [file]) == {self.name: f"{file} has changed"}
        assert group.folds(fault.caught_by)

    @pytest.mark.starts_processes
    @pytest.mark.timeout(2 * SECONDS + 100)
    def test_a_fault_that_a_push_passes_is_found(self) -> None:
        faulthandler.cancel_dump_traceback_later()  # pytest's limit for native code is shorter than ours
        group, fault = GROUPS[self.name], GROUP_MUTANTS[self.name]
        found = run_under(f"{PREFIX}{self.name}", [fault.caught_by], SECONDS)
        assert found.returncode == FAILED, found.stdout[-2000:]
        assert "1 failed" in found.stdout
        assert "from pytest-timeout" not in found.stdout
        pushed = run_under(f"{PREFIX}{self.name}", ["--tier", "push", *group.tests], SECONDS)
        assert pushed.returncode == (PASSED if group.push else NONE), pushed.stdout[-4000:]


def _class_of(name: str) -> type[_OfGroup]:
    title = "".join(word.capitalize() for word in name.split("-"))
    return type(f"Test{title}", (_OfGroup,), {"name": name, "__module__": __name__})


globals().update({kind.__name__: kind for kind in map(_class_of, GROUP_MUTANTS)})


def test_the_page_has_every_mutant() -> None:
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    for name, fault in GROUP_MUTANTS.items():
        assert f"| `{name}` | `{fault.caught_by.partition('::')[2]}` | {fault.fault} |" in page, (
            "run `python -m tests.campaigns.matrix --missing docs/mutants.md`"
        )
