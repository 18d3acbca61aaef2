"""What a run leaves behind: series, epochs, logs, stop reasons; NaN policies; the slow rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from distributed import Callback
from distributed.errors import UserError
from distributed.interfaces.callback import Band, Context
from distributed.interfaces.history import History
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit, sample_order
from distributed.testing.rank_pool import RankPool
from distributed.training.phase_timers import find_straggler
from distributed.training.step_records import StepRecords
from tests.support.training import OnStep, make_trainer

EXACT = 1e-9
trainer_of = partial(
    make_trainer, optimizer=SGD, learning_rate=0.3, global_batch_size=4, log_every_n_steps=50
)


# -- series ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("ranks", [1, 2])
def test_series_and_epochs_are_the_oracles(ranks: int, every: int, rank_pool: RankPool) -> None:
    x, y = problem(13)
    reference = small_model()
    seen = oracle_fit(reference, SGD(reference.parameters(), lr=0.3), x, y, global_batch_size=4, steps=12)
    history = trainer_of(small_model(), ranks, rank_pool, log_every_n_steps=every, epochs=3).fit(
        (x, y), (x, y)
    )
    assert history.steps["step"] == list(range(1, 13))
    assert history.steps["loss"] == pytest.approx(seen.losses, abs=EXACT)
    assert history.steps["learning_rate"] == [0.3] * 12
    sizes = [4, 4, 4, 1]
    means = [
        sum(loss * size for loss, size in zip(seen.losses[start : start + 4], sizes, strict=True)) / 13
        for start in (0, 4, 8)
    ]
    assert [epoch["train_loss"] for epoch in history.epochs] == pytest.approx(means, abs=EXACT)
    assert [(epoch["epoch"], epoch["step"]) for epoch in history.epochs] == [(0, 4), (1, 8), (2, 12)]
    val_loss = float(F.cross_entropy(reference(x), y).detach())
    assert history.epochs[2]["val_loss"] == pytest.approx(val_loss, abs=EXACT)
    assert (history.num_samples, history.world_size, history.backend) == (39, ranks, "pytorch-ddp")
    assert history.batch["global_batch_size"] == 4
    assert History.from_dict(history.to_dict()) == history


class Log(Callback):
    """Writes down in rank 0's history what it is told, so that it comes back."""

    def on_step_end(self, context: Context) -> None:
        context.log("twice_the_step", 2.0 * context.progress.step)

    def on_log(self, context: Context, metrics: Mapping[str, float]) -> None:
        context.history.batch[f"log {metrics['step']:.0f}"] = context.progress.samples


def test_logs_come_every_n_steps_and_at_the_end_of_an_epoch(rank_pool: RankPool) -> None:
    trainer = trainer_of(small_model(), 2, rank_pool, log_every_n_steps=3, epochs=2)
    trainer.callbacks = [Log()]
    history = trainer.fit(problem(20))
    assert [log["step"] for log in history.logs] == [3, 5, 6, 9, 10]
    assert [log["twice_the_step"] for log in history.logs] == [6, 10, 12, 18, 20]
    assert ["grad_norm" in log for log in history.logs] == [True, False, True, True, False]
    assert {name: value for name, value in history.batch.items() if name.startswith("log")} == {
        "log 3": 12, "log 5": 20, "log 6": 4, "log 9": 16, "log 10": 20,
    }  # fmt: skip
    losses = history.steps["loss"]
    assert history.logs[0]["loss"] == pytest.approx(sum(losses[:3]) / 3)
    assert all(log["samples_per_second"] > 0 and log["memory_rss_mb"] > 0 for log in history.logs)


class LogEverywhere(Callback):
    """Logs a number in every event, so that it is known where it arrives."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_run_start(self, context: Context) -> None:
        context.log("start", 1.0)

    def on_step_end(self, context: Context) -> None:
        self.num_steps += 1
        context.log("steps", self.num_steps)

    def on_log(self, context: Context, metrics: Mapping[str, float]) -> None:
        context.log("log", metrics["step"])

    def on_validation_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        context.log("validation", context.progress.step)

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        context.log("epoch end", context.progress.epoch)

    def on_run_end(self, context: Context, status: str) -> None:
        context.log("run end", self.num_steps)


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_logged_in_any_event_arrives_in_the_record_of_its_step(
    ranks: int, every: int, rank_pool: RankPool
) -> None:
    trainer = trainer_of(small_model(), ranks, rank_pool, log_every_n_steps=every, epochs=2)
    trainer.callbacks = [LogEverywhere()]
    logs = trainer.fit(problem(20), problem(4)).logs
    ends = [5, 10]
    steps = sorted({*range(every, 11, every), *ends})
    assert [log["step"] for log in logs] == steps
    assert [log["steps"] for log in logs] == steps
    assert [log["log"] for log in logs] == steps
    assert [(log["step"], log["validation"]) for log in logs if "validation" in log] == [(5, 5), (10, 10)]
    assert [(log["step"], log["epoch end"]) for log in logs if "epoch end" in log] == [(5, 1), (10, 2)]
    assert [log.get("start") for log in logs] == [1.0] + [None] * (len(logs) - 1)
    if ranks == 1:  # started ranks have returned their history before
        assert [(log["step"], log["run end"]) for log in logs if "run end" in log] == [(10, 10)]


def test_no_epochs_is_no_training(rank_pool: RankPool) -> None:
    model = small_model()
    history = trainer_of(model, 1, rank_pool, epochs=0, scheduler="cosine").fit(problem(8), problem(4))
    assert (history.epochs, history.logs, history.num_samples) == ([], [], 0)
    assert history.steps == {"step": [], "loss": [], "learning_rate": []}
    assert history.best_accuracy is None
    assert distance(model, small_model()) == 0.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_best_accuracy_is_the_best_epochs(ranks: int, rank_pool: RankPool) -> None:
    x, y = problem(12)
    trainer = trainer_of(small_model(), ranks, rank_pool, epochs=6, learning_rate=8.0)
    history = trainer.fit((x, y), (x, y))
    found = [epoch["val_accuracy"] for epoch in history.epochs]
    assert len(set(found)) > 1
    assert history.best_accuracy == trainer.best_accuracy == max(found)
    again = trainer.fit((x, y), (x, y), epochs=1)
    assert again.best_accuracy == max(*found, again.epochs[0]["val_accuracy"])


# -- callbacks ---------------------------------------------------------------------------------


class Tell(Callback):
    """Notes on its rank who acted; the last on rank 0 brings it home."""

    def __init__(self, name: str, band: Band, all_ranks: bool = False) -> None:
        self.name, self.band, self.all_ranks = name, band, all_ranks

    def _note(self, context: Any, event: str) -> None:
        if not hasattr(context, "notes"):
            context.notes = []
        context.notes.append((event, self.name))

    def on_run_start(self, context: Context) -> None:
        self._note(context, "start")

    def on_step_end(self, context: Context) -> None:
        self._note(context, "step")

    def on_validation_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._note(context, "validation")

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._note(context, "epoch")


class Home(Callback):
    band = Band.CHECKPOINT
    all_ranks = True

    def on_epoch_end(self, context: Any, metrics: Mapping[str, float]) -> None:
        context.history.batch["notes"] = context.backend.gather_objects(context.notes)


def test_callbacks_act_in_bands_and_on_their_ranks(rank_pool: RankPool) -> None:
    trainer = trainer_of(small_model(), 2, rank_pool)
    trainer.callbacks = [Home(), Tell("track", Band.TRACK), Tell("all", Band.DECIDE, True),
                         Tell("first", Band.METRICS)]  # fmt: skip
    zero, one = trainer.fit(problem(4), problem(4)).batch["notes"]  # type: ignore[misc]
    events = ("start", "step", "validation", "epoch")
    assert [tuple(note) for note in zero] == [
        (event, name) for event in events for name in ("first", "all", "track")
    ]
    assert [tuple(note) for note in one] == [(event, "all") for event in events]


@pytest.mark.parametrize(("every", "steps"), [(1, 3), (4, 4), (50, 5)])
def test_a_stop_comes_at_the_next_log_step(every: int, steps: int, rank_pool: RankPool) -> None:
    trainer = trainer_of(small_model(), 2, rank_pool, log_every_n_steps=every, epochs=9)
    trainer.callbacks = [OnStep(lambda context: context.request_stop("enough"), step=3, rank=0)]
    history = trainer.fit(problem(20), problem(4))
    assert history.stop_reason == "enough"
    assert len(history.steps["loss"]) == steps
    assert len(history.epochs) == 1
    # The next fit goes on at the next sample, and is not stopped by what was asked before.
    trainer.callbacks = []
    again = trainer.fit(problem(20), max_steps=2)
    assert again.stop_reason is None
    assert again.steps["step"] == [steps + 1, steps + 2]


# -- what is not finite ------------------------------------------------------------------------


class Poisoned(nn.Module):
    """NaN for the sample whose first number is 99."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output * torch.where(x[:, :1] == 99, math.nan, 1.0)


def poisoned() -> tuple[Tensor, Tensor, int]:
    """Data of 3 global batches, and which of them (from 0) holds the poison."""
    x, y = problem(12)
    x[7, 0] = 99
    return x, y, sample_order(12, 0, 0).tolist().index(7) // 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run(ranks: int, rank_pool: RankPool) -> None:
    x, y, where = poisoned()
    with pytest.raises(UserError, match=f"the loss is nan at step {where + 1} ") as caught:
        trainer_of(Poisoned(), ranks, rank_pool).fit((x, y))
    assert caught.value.field == "on_nan"


@pytest.mark.parametrize("ranks", [1, 2])
def test_such_a_step_may_be_left_out(ranks: int, rank_pool: RankPool) -> None:
    x, y, where = poisoned()
    model = Poisoned()
    history = trainer_of(model, ranks, rank_pool, on_nan="skip", log_every_n_steps=1, warmup_steps=3).fit(
        (x, y)
    )
    reference = small_model()
    order = sample_order(12, 0, 0)
    losses, rates, rate = [], [], 0
    for step in range(3):
        batch = order[4 * step : 4 * step + 4]
        rates.append(0.3 * (rate + 1) / 3)
        if step == where:
            continue
        loss = F.cross_entropy(reference(x[batch]), y[batch])
        grads = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(reference.parameters(), grads, strict=True):
                parameter -= rates[-1] * grad
        losses.append(float(loss.detach()))
        rate += 1
    assert history.num_skipped_steps == 1
    assert math.isnan(history.steps["loss"][where])
    assert history.steps["learning_rate"] == pytest.approx(rates)
    assert distance(model.inner, reference) < EXACT
    assert history.epochs[0]["train_loss"] == pytest.approx(sum(losses) / 2, abs=EXACT)


def test_or_ignored(rank_pool: RankPool) -> None:
    x, y, _ = poisoned()
    model = Poisoned()
    history = trainer_of(model, 1, rank_pool, on_nan="ignore").fit((x, y))
    assert math.isnan(history.epochs[0]["train_loss"])
    assert all(p.isnan().all() for p in model.inner[2].parameters())


# -- the slow rank -----------------------------------------------------------------------------


def phases(**odd: dict[str, float]) -> list[dict[str, float]]:
    return [{"forward": 0.1, "backward": 0.1, **odd.get(f"rank{rank}", {})} for rank in range(2)]


def test_waiting_for_another_ranks_logging_is_not_slowness() -> None:
    # Rank 0 writes logs for 0.3 s; rank 1 spends them in its next backward.
    assert find_straggler(phases(rank0={"other": 0.3}, rank1={"backward": 0.4})) is None
    found = find_straggler(phases(rank1={"other": 0.01, "forward": 0.3}, rank0={"backward": 0.3}))
    assert found is not None
    assert found[0] == 1


def recorder_of(rank: int) -> StepRecords:
    nothing: Any = None
    backend: Any = SimpleNamespace(world=SimpleNamespace(rank=rank, num_nodes=1))
    state: Any = SimpleNamespace(progress=SimpleNamespace(step=7, total_samples=0))
    return StepRecords(nothing, backend, state, nothing)


def test_a_rank_is_named_when_it_is_slow_twice_running(caplog: pytest.LogCaptureFixture) -> None:
    recorder = recorder_of(0)
    one, zero, none = phases(rank1={"forward": 0.5}), phases(rank0={"forward": 0.5}), phases()
    with caplog.at_level(logging.WARNING, "distributed"):
        for interval in (one, zero, one, none, one):
            recorder._warn_of_stragglers(interval)
        assert caplog.messages == []
        recorder._warn_of_stragglers(one)
        silent = recorder_of(1)
        silent._warn_of_stragglers(one)
        silent._warn_of_stragglers(one)
    assert caplog.messages == [
        "rank 1 spends 400 % more time in forward than the median rank (steps up to 7)"
    ]


def test_shares_of_time_are_shares_of_the_interval(rank_pool: RankPool) -> None:
    history = trainer_of(small_model(), 2, rank_pool, log_every_n_steps=2).fit(problem(40))
    shares = [sum(v for k, v in log.items() if k.startswith("time_")) for log in history.logs]
    assert all(0 < share <= 1.001 for share in shares)
