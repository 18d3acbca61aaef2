"""The predicted peak of a rank is that of real runs, which glibc measures."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.support.commands import run
from tests.support.predicted_memory import CP, FSDP, FULL, ONE_F_ONE_B, SERIAL, TP, ZERO, compare

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

WITHIN = 0.01

# A part of all runs, because each starts ranks: `python -m tests.benchmarks.predicted_memory` measures all.
RUNS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [TP, CP, ZERO | {"zero_stage": 3}, SERIAL],
    "phi": [FSDP | FULL, ONE_F_ONE_B],
}


@pytest.mark.starts_processes
@pytest.mark.parametrize("name", RUNS)
def test_predictions_are_within_one_percent(name: str) -> None:
    found = compare(name, RUNS[name])
    assert [row for row in found if abs(row[2] / row[1] - 1) > WITHIN] == []


@pytest.mark.starts_processes
def test_the_measurement_counts_what_is_live() -> None:
    """Two tensors of 64 and 128 MiB at once, after one of 160 MiB: 192 MiB, and a page for each."""
    program = """
import torch
from tests.support.peak_memory import count_mappings, live_bytes, max_bytes
count_mappings()
before, most = live_bytes(), max_bytes()
assert most - before < 2**26, "the process had more before"
alone = torch.empty(5 * 2**23)
del alone
both = torch.empty(2**24), torch.empty(2**25)
print(live_bytes() - before, max_bytes() - before)
"""
    done = run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(3 * 2**26 + 2 * 4096)] * 2
