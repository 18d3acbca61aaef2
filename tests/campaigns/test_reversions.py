"""The tests of repaired faults can fail: each is red while its fault is put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.reversions.run import FAILED, run_under
from tests.campaigns.reversions.table import REVERSIONS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", REVERSIONS)
def test_a_fault_that_is_put_back_is_found(name: str) -> None:
    done = run_under(name, [REVERSIONS[name].caught_by], 200)
    assert done.returncode == FAILED, done.stdout[-2000:]
    assert "1 failed" in done.stdout or "1 error" in done.stdout  # a fixture may compare


def test_the_page_has_every_fault() -> None:
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    for fault in REVERSIONS.values():
        assert f"| {fault.fault} | `{fault.caught_by.rpartition('::')[2]}` |" in page, (
            "run `python -m tests.campaigns.matrix --missing docs/mutants.md`"
        )
