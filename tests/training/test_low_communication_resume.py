"""Ranks that train on their own resume with the same bits at each step of a period, and on another number of
ranks as if all of them had been made equal where the run was saved."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import Preempted
from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool
from tests.support.training import Die, make_trainer
from tests.training import low_communication_mutants
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
    pool: RankPool | None,
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = STEPS,
    model: Any = None,
    length: int = LENGTH,
    **given: Any,
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
    trainer.fit(problem(length), max_steps=steps)
    return model


def after(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


@pytest.mark.parametrize(
    "given",
    [{}, {"low_communication": STREAMING}, CODED, {"model": Normalised(), "length": 48}],
    ids=["diloco", "streaming", "streaming by a codec", "statistics"],
)
def test_each_step_of_a_period_resumes_with_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, given: dict[str, Any]
) -> None:
    fit(rank_pool, tmp_path / "whole", **given)
    for step in range(1, 5):
        start = str(after(tmp_path / "whole", step))
        fit(rank_pool, tmp_path / str(step), resume_from_checkpoint=start, **given)
        for later in range(step + 1, STEPS + 1):
            whole, resumed = (PortableReader(str(after(tmp_path / n, later))) for n in ("whole", str(step)))
            assert list(differences(whole, resumed)) == [], f"from step {step}, after step {later}"


@pytest.mark.parametrize("mutant", low_communication_mutants.OF_RESUMING)
def test_broken_forms_of_resuming_are_noticed(mutant: str, rank_pool: RankPool, tmp_path: Path) -> None:
    fit(rank_pool, tmp_path / "whole")
    start = str(after(tmp_path / "whole", 4))
    with low_communication_mutants.registered(mutant):
        fit(rank_pool, tmp_path / "resumed", backend=mutant, resume_from_checkpoint=start)
    ends = [PortableReader(str(after(tmp_path / name, STEPS))) for name in ("whole", "resumed")]
    assert list(differences(*ends))


@pytest.mark.starts_processes
def test_a_rank_that_is_killed_within_a_period_changes_no_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    whole = fit(rank_pool, tmp_path / "whole", low_communication=STREAMING)
    model = fit(
        None,
        tmp_path / "killed",
        low_communication=STREAMING,
        callbacks=[DieOnce(5, 1, marker=tmp_path / "died")],
        elastic={"max_restarts": 1},
    )
    assert (tmp_path / "died").exists()
    assert distance(model, whole) == 0.0


class DieOnce(Die):
    """`Die` in the first attempt alone."""

    def __init__(self, step: int, rank: int, marker: Path) -> None:
        super().__init__(step, rank)
        self.marker = marker

    def on_step_end(self, context: Context) -> None:
        if (
            self.step == context.progress.step
            and self.rank == context.world.rank
            and not self.marker.exists()
        ):
            self.marker.touch()
            super().on_step_end(context)


def test_a_preempted_run_resumes_within_a_period(rank_pool: RankPool, tmp_path: Path) -> None:
    given = {"low_communication": STREAMING, "checkpoint": {}}
    whole = fit(rank_pool, tmp_path / "whole", **given)
    with pytest.raises(Preempted):
        fit(
            rank_pool, tmp_path / "parts", callbacks=[Die(5, 1, signal.SIGTERM)], log_every_n_steps=1, **given
        )
    model = fit(rank_pool, tmp_path / "parts", **given)
    assert distance(model, whole) == 0.0
    ends = [PortableReader(str(after(tmp_path / name, STEPS))) for name in ("whole", "parts")]
    assert list(differences(*ends)) == []


@pytest.mark.parametrize(
    ("name", "ranks"), [("local SGD", 3), ("DiLoCo", 1), ("streaming", 1), ("streaming", 3)]
)
def test_another_number_of_ranks_begins_with_an_outer_step_of_all_that_saved(
    rank_pool: RankPool, tmp_path: Path, name: str, ranks: int
) -> None:
    """Saved by two ranks after five steps: in a period, and in an exchange."""
    section, numbers = ALGORITHMS[name]
    given = {"low_communication": section, "optimizer": momentum}
    fit(rank_pool, tmp_path, steps=6, **given)
    start = str(after(tmp_path, 5))
    model = fit(rank_pool, tmp_path / "on", ranks=ranks, resume_from_checkpoint=start, **given)

    order, (x, y) = sample_order(LENGTH, 0, 0), problem(LENGTH)
    before, oracle = (Oracle(small_model, momentum, n, **numbers) for n in (2, ranks))
    for batch in order.split(BATCH)[:5]:
        before.take_step(x, y, batch)
    before.merge()
    oracle.begin_after(before)
    for batch in order.split(BATCH)[5:STEPS]:
        oracle.take_step(x, y, batch)
    oracle.merge()
    assert distance(model, oracle.workers[0]) < 1e-9


def test_a_state_between_outer_steps_is_read_by_such_ranks_only(rank_pool: RankPool, tmp_path: Path) -> None:
    fit(rank_pool, tmp_path, steps=4)
    given = {"resume_from_checkpoint": str(after(tmp_path, 2)), "low_communication": {}}
    with pytest.raises(UserError, match="checkpoint of an epoch's end"):
        fit(rank_pool, tmp_path / "none", **given)
    with pytest.raises(UserError, match="checkpoint of an epoch's end"):
        fit(rank_pool, tmp_path / "none", ranks=1, backend="serial", **given)


def test_a_state_of_equal_ranks_is_read_by_all(rank_pool: RankPool, tmp_path: Path) -> None:
    """The model of an outer step, and the optimizer state of rank 0; and the other way round."""
    fit(rank_pool, tmp_path, steps=4)
    start = {"resume_from_checkpoint": str(after(tmp_path, 3))}
    model = fit(rank_pool, tmp_path / "serial", ranks=1, backend="serial", low_communication={}, **start)
    oracle = Oracle(small_model, adamw, 2, **ALGORITHMS["DiLoCo"][1])
    order, (x, y) = sample_order(LENGTH, 0, 0), problem(LENGTH)
    for batch in order.split(BATCH)[:3]:
        oracle.take_step(x, y, batch)
    for batch in order.split(BATCH)[3:STEPS]:
        optimizer, worker = oracle.inner[0], oracle.workers[0]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(worker(x[batch]), y[batch]).backward()
        optimizer.step()
    assert distance(model, oracle.workers[0]) < 1e-9


def test_a_second_fit_keeps_the_outer_momentum(rank_pool: RankPool) -> None:
    """In this process and in ranks that fit starts."""
    section, numbers = ALGORITHMS["DiLoCo"]
    for ranks in (1, 2):
        model, data = small_model(), problem(LENGTH)
        trainer = make_trainer(
            model, ranks, rank_pool, low_communication=section, global_batch_size=BATCH, optimizer=momentum
        )
        trainer.fit(data)
        trainer.fit(data)
        oracle = Oracle(small_model, momentum, ranks, **numbers)
        oracle.train(*data, BATCH, 2)
        assert distance(model, oracle.workers[0]) < 1e-9
