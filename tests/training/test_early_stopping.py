"""EarlyStopping stops all ranks after the same epoch, and a run that has stopped stays so."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import Callback, EarlyStopping, History, Trainer, UserError
from distributed.checkpoint.filesystem import seal, unseal
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


def test_stops_after_patience_on_two_ranks(rank_pool: RankPool) -> None:
    # A rate of almost nothing leaves the validation loss where it is.
    fields = {"batch_size": 4, "learning_rate": 1e-300, "optimizer": torch.optim.SGD}
    trainer = make_trainer(small_model(), 2, rank_pool, **fields, callbacks=[EarlyStopping(patience=2)])
    history = trainer.fit(problem(16), problem(8), epochs=10)
    assert len(history.epochs) == 3
    assert history.stop_reason is not None
    assert "val_loss has not improved for 2 epochs" in history.stop_reason


def test_goes_on_while_it_improves() -> None:
    stopping = EarlyStopping("train_loss", patience=1)
    trainer = make_trainer(
        small_model(), backend="serial", batch_size=4, learning_rate=0.01, callbacks=[stopping]
    )
    history = trainer.fit(problem(16), epochs=5)
    assert (len(history.epochs), history.stop_reason) == (5, None)


def test_unknown_figure_is_named() -> None:
    trainer = Trainer(small_model(), backend="serial", callbacks=[EarlyStopping("val_acuracy")])
    with pytest.raises(
        UserError, match=r"EarlyStopping.metric: no such metric was reported this epoch. Got 'val_acuracy'"
    ):
        trainer.fit(problem(8), problem(4))


# -- the decision to stop belongs to the saved state ---------------------------------------------


class StopAt(Callback):
    """Request a stop on the last rank, in `event` of a step."""

    all_ranks = True

    def __init__(self, event: str, step: int, final: bool = True) -> None:
        self.event, self.step, self.final = event, step, final

    def _act(self, event: str, context: Context) -> None:
        last = context.world.rank == context.world.size - 1
        if last and (event, context.progress.step) == (self.event, self.step):
            context.request_stop("seen enough", **({} if self.final else {"final": False}))

    def on_step_end(self, context: Context) -> None:
        self._act("step", context)

    def on_log(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._act("log", context)

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._act("epoch", context)


def steps_of(history: History) -> list[float]:
    return history.steps.get("step", [])


@pytest.mark.parametrize(
    ("event", "step", "ends", "fields"),
    [
        ("epoch", 8, 8, {}),
        ("epoch", 8, 8, {"checkpoint_frequency": 9}),
        ("step", 6, 6, {"checkpoint_frequency": 9}),
        ("log", 6, 7, {"checkpoint": {"every_n_steps": 7, "asynchronous": False}}),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_that_is_resumed_ends_at_once(
    ranks: int,
    event: str,
    step: int,
    ends: int,
    fields: dict[str, Any],
    rank_pool: RankPool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def trainer(epochs: int = 9, **more: Any) -> tuple[Any, Trainer]:
        model = small_model()
        return model, make_trainer(
            model, ranks, rank_pool, folder=tmp_path, global_batch_size=4, epochs=epochs, learning_rate=0.1,
            optimizer="sgd", resume_from_checkpoint=True, **{**fields, **more},
        )  # fmt: skip

    stopped, first = trainer(callbacks=[StopAt(event, step)])
    history = first.fit(problem(16), problem(8))
    assert history.stop_reason == "seen enough"
    assert history.checkpoint == str(tmp_path / f"step_{ends:08d}")
    saved = PortableReader(history.checkpoint).extra["progress"]
    for _ in range(2):
        capfd.readouterr()
        again, second = trainer()
        resumed = second.fit(problem(16), problem(8))
        assert (steps_of(resumed), resumed.epochs) == ([], [])
        assert (resumed.stop_reason, resumed.checkpoint) == ("seen enough", history.checkpoint)
        assert resumed.best_accuracy == history.best_accuracy
        assert distance(stopped, again) == 0.0
        assert PortableReader(history.checkpoint).extra["progress"] == saved
        said = capfd.readouterr().out.splitlines()[1]
        assert said.startswith(f"the run ended at step {ends}, as requested: seen enough. ")
        assert "epochs above 9" in said
        assert "checkpoint.continue_stopped" in said
    # Further on purpose: by a larger goal or by the field, and in the same process as ever.
    more, third = trainer(epochs=10, max_steps=ends + 2, checkpoint_frequency=1)
    further = third.fit(problem(16), problem(8))
    assert (further.stop_reason, steps_of(further)) == (None, [ends + 1, ends + 2])
    expected, oracle = small_model(), problem(16)
    oracle_fit(expected, torch.optim.SGD(expected.parameters(), lr=0.1), *oracle,
               global_batch_size=4, steps=ends + 2)  # fmt: skip
    assert distance(more, expected) < 1e-9
    assert steps_of(third.fit(problem(16), problem(8), max_steps=1)) == [ends + 3]


def test_a_second_fit_and_the_field_continue_a_stopped_run(rank_pool: RankPool, tmp_path: Path) -> None:
    def trainer(**more: Any) -> Trainer:
        return make_trainer(
            small_model(), 2, rank_pool, folder=tmp_path, global_batch_size=4, epochs=9,
            resume_from_checkpoint=True, callbacks=[StopAt("epoch", 4), StopAt("epoch", 8)], **more,
        )  # fmt: skip

    one = trainer()
    assert (one.fit(problem(16)).stop_reason, one.config.epochs) == ("seen enough", 9)
    assert steps_of(one.fit(problem(16))) == [5, 6, 7, 8]
    assert steps_of(trainer().fit(problem(16))) == []
    assert steps_of(trainer(checkpoint={"continue_stopped": True}).fit(problem(16), max_steps=10)) == [9, 10]


def test_a_stop_from_outside_is_no_decision_of_the_run(rank_pool: RankPool, tmp_path: Path) -> None:
    """As when a time limit is reached: the step is saved, and a resumed run continues."""
    for steps in ([1, 2], list(range(3, 9))):
        history = make_trainer(
            small_model(), 2, rank_pool, folder=tmp_path, global_batch_size=4, epochs=2,
            resume_from_checkpoint=True, checkpoint_frequency=9,
            callbacks=[StopAt("step", 2, final=False)],
        ).fit(problem(16))  # fmt: skip
        assert steps_of(history) == steps
    assert history.stop_reason is None


def test_a_checkpoint_of_an_earlier_version_knows_of_no_stop(rank_pool: RankPool, tmp_path: Path) -> None:
    """Its progress has no entry for it."""

    def trainer(**more: Any) -> Trainer:
        fields = {"global_batch_size": 4, "epochs": 3, "resume_from_checkpoint": True}
        return make_trainer(small_model(), 1, rank_pool, folder=tmp_path, **fields, **more)

    path = trainer(callbacks=[StopAt("epoch", 4)]).fit(problem(16)).checkpoint
    manifest = Path(str(path), "manifest.json")
    content = unseal(manifest.read_bytes())
    progress = content["extra"]["progress"]
    content["extra"]["progress"] = {k: v for k, v in progress.items() if not k.startswith("stop_")}
    assert content["extra"]["progress"] != progress
    manifest.write_bytes(seal(content))
    assert steps_of(trainer().fit(problem(16))) == list(range(5, 13))


class DieAtTheEnd(Callback):
    """Kill rank 1 once the run has stopped and saved; only once."""

    all_ranks = True

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_run_end(self, context: Context, status: str) -> None:
        if context.world.rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.starts_processes
def test_a_restart_within_one_fit_keeps_the_decision(tmp_path: Path) -> None:
    model, expected = small_model(), small_model()
    history = make_trainer(
        model, 2, folder=tmp_path / "run", global_batch_size=4, epochs=9, elastic={"max_restarts": 2},
        learning_rate=0.1, optimizer="sgd", callbacks=[StopAt("epoch", 8), DieAtTheEnd(tmp_path / "died")],
    ).fit(problem(16))  # fmt: skip
    assert len(history.restarts) == 1
    assert "SIGKILL" in history.restarts[0]
    assert history.stop_reason == "seen enough"
    oracle_fit(expected, torch.optim.SGD(expected.parameters(), lr=0.1), *problem(16),
               global_batch_size=4, steps=8)  # fmt: skip
    assert distance(model, expected) < 1e-9
