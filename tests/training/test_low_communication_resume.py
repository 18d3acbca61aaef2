"""Ranks that train on their own resume with the same bits at each step of a period, and on another number of
ranks as if all of them had been made equal where the run was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError, WorkerError
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool
from tests.support.training import Die, make_trainer
from tests.training.low_communication_oracle import Oracle
from tests.training.test_low_communication import (
    ALGORITHMS,
    BATCH,
    DILOCO,
    STREAMING,
    Normalised,
    adamw,
    momentum,
)

LENGTH, STEPS = 44, 8
CODED = {"low_communication": STREAMING, "compression": {"codec": "random-k", "ratio": 0.5}}


def fit(
    pool: RankPool, folder: Path, *, ranks: int = 2, steps: int = STEPS, model: Any = None, **given: Any
) -> Any:
    """A run of at most one epoch of eight steps that saves after each; returns its model."""
    model = small_model() if model is None else model
    fields = {
        "optimizer": adamw,
        "low_communication": DILOCO,
        "global_batch_size": BATCH,
        "resume_from_checkpoint": True,
        "deterministic": True,
        "checkpoint": {"every_n_steps": 1, "keep_last": None},
    }
    trainer = make_trainer(model, ranks, pool, folder=folder, **{**fields, **given})
    trainer.fit(problem(LENGTH), max_steps=steps)
    return model


def after(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


@pytest.mark.parametrize(
    "given",
    [{}, {"low_communication": STREAMING}, CODED, {"model": Normalised()}],
    ids=["diloco", "streaming", "streaming by a codec", "statistics"],
)
def test_each_step_of_a_period_resumes_with_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, given: dict[str, Any]
) -> None:
    fit(rank_pool, tmp_path / "whole", **given)
    for step in range(1, 5):
        start = str(after(tmp_path / "whole", step))
        fit(rank_pool, tmp_path / str(step), resume_from_checkpoint=start, steps=STEPS - 0, **given)
        for later in range(step + 1, STEPS + 1):
            whole, resumed = (PortableReader(str(after(tmp_path / n, later))) for n in ("whole", str(step)))
            assert list(differences(whole, resumed)) == [], f"from step {step}, after step {later}"
