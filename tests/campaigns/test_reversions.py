"""The tests of repaired faults can fail: each is red while its fault is put back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.reversions.table import REVERSIONS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FAILED = 1
"""Exit code of pytest when a test failed; 4 and 5 when there is no such test."""


@pytest.mark.parametrize("name", REVERSIONS)
def test_a_fault_that_is_put_back_is_found(name: str) -> None:
    fault = REVERSIONS[name]
    environment = {
        **os.environ,
        "REVERSION": name,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("reversions")), str(ROOT)]),
    }
    # Rewritten assertions would import our modules past the hook in sitecustomize.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        fault.caught_by,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == FAILED, done.stdout[-2000:]
    assert "1 failed" in done.stdout or "1 error" in done.stdout  # a fixture may compare


def test_the_page_has_every_fault() -> None:
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    for fault in REVERSIONS.values():
        assert f"| {fault.fault} | `{fault.caught_by.rpartition('::')[2]}` |" in page, (
            "run `python -m tests.campaigns.matrix --missing docs/mutants.md`"
        )
