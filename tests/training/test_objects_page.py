"""The table of docs/objects.md is what is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.testing.rank_pool import RankPool
from tests.support.torchrun import under_torchrun
from tests.training.objects_table import measure

ROOT = Path(__file__).parents[2]


def table() -> dict[str, list[str]]:
    """Cells of the page's table by their row."""
    lines = (ROOT / "docs" / "objects.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: cells for name, *cells in rows[1:]}


class Looks(Launcher):
    """The pool's launcher, which looks at the script's objects when the ranks have ended."""

    def __init__(self, pool: RankPool, look: Callable[[], None]) -> None:
        self._pool, self._look = pool, look

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        self._pool.run(plan, command)
        self._look()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def test_in_one_process() -> None:
    expected = {row: [taken, own, after] for row, (taken, _, own, after) in table().items()}
    assert measure("serial", 1, None) == expected


def test_on_started_ranks(rank_pool: RankPool) -> None:
    expected = {row: [taken, started, after] for row, (taken, started, _, after) in table().items()}
    assert measure("pytorch-ddp", 2, lambda look: Looks(rank_pool, look)) == expected


@pytest.mark.starts_processes
def test_on_joined_ranks(forking_python: Path) -> None:
    output, _ = under_torchrun(forking_python, "tests.training.objects_table")
    expected = {row: [taken, own, after] for row, (taken, _, own, after) in table().items()}
    assert json.loads(output.splitlines()[-1]) == expected
