"""The predicted peak of a rank is that of real runs, measured by glibc, on models that were not used to
build it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning.collect_facts import collect_facts
from distributed.planner.estimates.device_memory import MAPPED_CPU
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.model_facts import ModelFacts
from distributed.planner.estimates.split import Split
from tests.support.commands import run
from tests.support.small_transformers import MODELS

pytest.importorskip("transformers")

SAMPLES = 4
WITHIN = 0.01

# In the order in which one process runs them: its maximum never falls, so that serial runs come with rising
# peaks.
RUNS: list[dict[str, Any]] = [
    {"backend": "pytorch-ddp", "ranks": 2},
    {"backend": "pytorch-ddp", "ranks": 2, "gradient_accumulation_steps": 3},
    {"backend": "fsdp", "ranks": 2},
    {"backend": "fsdp", "ranks": 2, "gradient_accumulation_steps": 3},
    {"backend": "fsdp", "ranks": 2, "activation_checkpointing": "full"},
    {"backend": "deepspeed", "ranks": 2, "zero_stage": 1},
    {"backend": "deepspeed", "ranks": 2, "zero_stage": 2, "gradient_accumulation_steps": 3},
    {"backend": "serial", "ranks": 1, "activation_checkpointing": "full"},
    {"backend": "serial", "ranks": 1},
    {"backend": "serial", "ranks": 1, "gradient_accumulation_steps": 3},
]


def predicted(facts: ModelFacts, entry: dict[str, Any]) -> int:
    axis = {"fsdp": "shard"}.get(entry["backend"], "data")
    split = Split(
        ParallelDims(**{axis: entry["ranks"]}),
        entry["backend"],
        zero_stage=entry.get("zero_stage", 0),
        micro_batch=SAMPLES,
        num_micro_batches=entry.get("gradient_accumulation_steps", 1),
        activation_checkpointing="activation_checkpointing" in entry,
    )
    return predict_memory(facts, split, MAPPED_CPU).total


@pytest.mark.starts_processes
@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_within_one_percent(name: str) -> None:
    build, batch = MODELS[name]
    facts = collect_facts(build(), batch(SAMPLES))
    arguments = json.dumps([{"name": name, "samples": SAMPLES, **entry} for entry in RUNS])
    done = run(
        [sys.executable, "-m", "tests.support.measure_memory", arguments],
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    off = {}
    for entry, truth in zip(RUNS, measured, strict=True):
        guess = predicted(facts, entry)
        print(name, entry, f"measured {truth / 2**20:.3f} predicted {guess / 2**20:.3f} MiB")
        off[json.dumps(entry)] = guess / truth - 1
    assert {entry: error for entry, error in off.items() if abs(error) > WITHIN} == {}


@pytest.mark.starts_processes
def test_the_measurement_counts_what_is_live() -> None:
    """Two tensors of 1 and 2 MiB at once, after one of 2.5 MiB: 3 MiB, and a page for each of the two."""
    program = """
import torch
from tests.support.peak_memory import count_mappings, live_bytes, max_bytes
count_mappings()
before, most = live_bytes(), max_bytes()
assert most - before < 2**20, "the process had more before"
alone = torch.empty(5 * 2**17)
del alone
both = torch.empty(2**18), torch.empty(2**19)
print(live_bytes() - before, max_bytes() - before)
"""
    done = run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(3 * 2**20 + 2 * 4096)] * 2
