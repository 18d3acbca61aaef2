"""When a run saves, what it calls best, and how it goes on."""

from __future__ import annotations

import logging
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.reader import PortableReader, verify
from distributed.checkpoint.torch_state import export_replicated, import_replicated
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.history import History
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Progress
from distributed.training.callback_runner import CallbackRunner
from distributed.training.mixins.checkpointing import CheckpointingMixin
from distributed.training.resuming import Resumer
from distributed.training.saving import Saver
from distributed.training.schedule import Schedule
from distributed.training.state import TrainState
from tests.campaigns.thread_ranks import Meeting, ThreadRank, on_ranks

STEPS_PER_EPOCH = 4


class ModelRank(ThreadRank):
    """One rank, a thread, that holds the whole model."""

    def __init__(
        self, rank: int, meeting: Meeting, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(rank, meeting)
        self.module, self.optimizer = model, optimizer

    def export_state(self) -> BackendState:
        return export_replicated(self.module, self.optimizer, None, self.world.rank, self.world.size)

    def import_state(self, reader: StateReader) -> None:
        import_replicated(reader, self.module, self.optimizer)


_latest: dict[str, Saver] = {}
"""Directory -> what saves there. A new run in a directory ends the one before."""


class Run(CheckpointingMixin):
    """A training loop in miniature: what the mixin is mixed into."""

    def __init__(self, config: DistributedConfig, rank: int = 0, meeting: Meeting | None = None) -> None:
        self.model = nn.Linear(3, 1)
        # Not from the global generator: the ranks are threads and share it.
        nn.init.constant_(self.model.weight, 0.3)
        nn.init.constant_(self.model.bias, -0.1)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.config, self.progress, self.history = config, Progress(), History()
        self.schedule = Schedule()
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.schedule.scheduler = self.scheduler
        backend: Any = ModelRank(rank, meeting or Meeting(1), self.model, optimizer)
        self.backend, self.world, self.optimizer = backend, backend.world, optimizer
        nothing: Any = None
        state = TrainState(self.progress, self.schedule, CallbackRunner(nothing, (), nothing), None)
        self.saver = Saver(config, backend, state, self.history)
        self.resumer = Resumer(self.saver)
        if rank == 0 and config.checkpoint_dir is not None:
            earlier = _latest.pop(config.checkpoint_dir, None)
            if earlier is not None:
                earlier.release()
            _latest[config.checkpoint_dir] = self.saver

    def step(self) -> bool:
        """One optimizer step; whether it ended an epoch."""
        self.optimizer.zero_grad()
        self.model(torch.full((1, 3), float(self.progress.step % 5))).sum().backward()
        self.optimizer.step()
        self.progress.step += 1
        self.progress.samples += 1
        if self.progress.samples == STEPS_PER_EPOCH:
            self.progress.samples, self.progress.epoch = 0, self.progress.epoch + 1
            self.scheduler.step()
        return self.progress.samples == 0

    def train(self, steps: int, accuracies: list[float] | None = None) -> list[str | None]:
        saved = []
        for _ in range(steps):
            end = self.step()
            metrics = {"val_accuracy": accuracies.pop(0), "val_loss": 1.0} if end and accuracies else None
            saved.append(self.saver.save_if_due(epoch_end=end, metrics=metrics))
        self.finish_saving()
        return saved

    def snapshot(self) -> Any:
        state = self.optimizer.state_dict()
        weights = [p.detach().numpy().tobytes() for p in self.model.parameters()]
        moments = [{k: v.numpy().tobytes() for k, v in entry.items()} for entry in state["state"].values()]
        return weights, moments, state["param_groups"], self.scheduler.state_dict(), asdict(self.progress)


def configured(directory: Path | None, **values: Any) -> DistributedConfig:
    return DistributedConfig(checkpoint_dir=None if directory is None else str(directory), **values)


def started(directory: Path | None, **values: Any) -> Run:
    run = Run(configured(directory, **values))
    run.saver.prepare()
    run.resumer.resume()
    return run


def saved_steps(saved: list[str | None]) -> list[int]:
    return [number + 1 for number, path in enumerate(saved) if path is not None]


@pytest.mark.parametrize(("values", "expected"), [
    ({}, [4, 8, 12]),
    ({"checkpoint_frequency": 2}, [8]),
    ({"checkpoint_frequency": 9, "checkpoint": {"every_n_steps": 3}}, [3, 6, 9, 12]),
    ({"checkpoint_frequency": 2, "checkpoint": {"every_n_steps": 5}}, [5, 8, 10]),
])  # fmt: skip
def test_frequency(values: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    run = started(tmp_path, **values)
    assert saved_steps(run.train(12)) == expected
    assert run.history.checkpoint == str(tmp_path / f"step_{expected[-1]:08d}")
    assert run.history.best_checkpoint is None


def test_without_a_directory_nothing_happens() -> None:
    run = started(None)
    assert run.train(8, [0.1, 0.2]) == [None] * 8
    assert run.save_now() is None
    assert run.history.checkpoint is None


def test_best_is_saved_whatever_the_frequency_and_knows_its_own_value(tmp_path: Path) -> None:
    run = started(tmp_path, checkpoint_frequency=100, checkpoint={"keep_last": 1})
    assert saved_steps(run.train(20, [0.5, 0.4, float("nan"), 0.5, 0.6])) == [4, 20]
    assert run.history.best_checkpoint == str(tmp_path / "step_00000020")
    assert PortableReader(run.history.best_checkpoint).extra["progress"]["best_metric"] == 0.6
    store = PortableCheckpointer(str(tmp_path), keep_last=None)
    assert store.best() == run.history.best_checkpoint
    run.train(4, [0.1])
    run.save_now()
    assert store.steps() == [24, 20]


@pytest.mark.parametrize(("section", "series", "best"), [
    ({}, [{"val_loss": 2.0}, {"val_loss": 1.0}, {"val_loss": 3.0}], 1),
    ({}, [{"val_loss": float("nan")}, {"val_loss": 5.0}], 1),
    ({"metric": "f1"}, [{"val_f1": 0.1}, {"val_f1": 0.0}], 0),
    ({"metric": "val_error_rate"}, [{"val_error_rate": 0.1}, {"val_error_rate": 0.0}], 1),
    ({"metric": "val_f1", "mode": "min"}, [{"val_f1": 0.1}, {"val_f1": 0.0}], 1),
    ({}, [{"train_loss": 2.0}, {"train_loss": 1.0}], None),
    ({"keep_best": False}, [{"val_loss": 1.0}], None),
])  # fmt: skip
def test_what_counts_as_best(section: Any, series: Any, best: int | None, tmp_path: Path) -> None:
    run = started(tmp_path, checkpoint=section)
    for metrics in series:
        run.step()
        run.saver.save_if_due(epoch_end=True, metrics=metrics)
    run.finish_saving()
    expected = None if best is None else str(tmp_path / f"step_{best + 1:08d}")
    assert run.history.best_checkpoint == expected


def test_an_unknown_metric_is_named(tmp_path: Path) -> None:
    run = started(tmp_path, checkpoint={"metric": "auc"})
    with pytest.raises(UserError, match=r"checkpoint\.metric: .*'auc'.*val_loss"):
        run.saver.save_if_due(epoch_end=True, metrics={"val_loss": 1.0})


@pytest.mark.parametrize("stop", [3, 4, 7, 10])
def test_a_resumed_run_is_the_uninterrupted_run(stop: int, tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", checkpoint={"every_n_steps": 1})
    whole.train(12, [0.5, 0.7, 0.6])
    first = started(tmp_path / "cut", checkpoint={"every_n_steps": 1})
    accuracies = [0.5, 0.7, 0.6]
    first.train(stop, accuracies)
    drawn = torch.rand(1), random.random()
    torch.rand(5)
    second = started(tmp_path / "cut", checkpoint={"every_n_steps": 1}, resume_from_checkpoint=True)
    assert (torch.rand(1), random.random()) == drawn
    assert second.progress.step == stop
    second.train(12 - stop, accuracies)
    assert second.snapshot() == whole.snapshot()
    assert second.history.best_checkpoint == str(tmp_path / "cut" / "step_00000008")


def test_resume_without_a_checkpoint_starts_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "distributed"):
        run = started(tmp_path / "new", resume_from_checkpoint=True)
    assert run.progress.step == 0
    assert "no checkpoint in" in caplog.text


def test_resume_passes_over_what_only_a_full_read_finds_damaged(tmp_path: Path) -> None:
    started(tmp_path).train(8)
    shard = tmp_path / "step_00000008" / "shard_00000_of_00001.bin"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    run = started(tmp_path, resume_from_checkpoint=True)
    assert run.progress.step == 4
    run.train(4)
    assert verify(str(shard.parent)) == []


def test_resume_from_a_path(tmp_path: Path) -> None:
    started(tmp_path / "a").train(8)
    step = tmp_path / "a" / "step_00000004"
    assert started(tmp_path / "b", resume_from_checkpoint=str(step)).progress.step == 4
    assert started(None, resume_from_checkpoint=str(tmp_path / "a")).progress.step == 8
    with pytest.raises(UserError, match="no such file or directory"):
        started(None, resume_from_checkpoint=str(tmp_path / "nowhere"))
    os.unlink(step / "rank_00000.json")
    with pytest.raises(UserError, match=r"rank_00000\.json"):
        started(None, resume_from_checkpoint=str(step))


def test_a_new_run_in_a_used_directory_keeps_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    started(tmp_path, checkpoint={"keep_last": 1}).train(8, [0.9, 0.95])
    other = started(tmp_path, checkpoint={"keep_last": 1})
    with caplog.at_level(logging.WARNING, "distributed"):
        other.train(4, [0.1])
    store = PortableCheckpointer(str(tmp_path), keep_last=None)
    assert store.steps() == [4]
    assert store.best() == store.latest() == other.history.best_checkpoint
    (aside,) = tmp_path.glob("superseded_*")
    assert str(aside) in caplog.text
    assert PortableCheckpointer(str(aside), keep_last=None).best() == str(aside / "step_00000008")


def test_going_on_from_an_older_step_does_not_meet_its_own_future(tmp_path: Path) -> None:
    started(tmp_path).train(12)
    run = started(tmp_path, resume_from_checkpoint=str(tmp_path / "step_00000004"))
    run.progress.total_samples = 77
    run.train(4)
    assert PortableCheckpointer(str(tmp_path), keep_last=None).steps() == [8, 4]
    assert PortableReader(str(tmp_path / "step_00000008")).extra["progress"]["total_samples"] == 77


def test_a_kill_between_save_and_mark_is_mended(tmp_path: Path) -> None:
    started(tmp_path).train(8, [0.5, 0.6])
    os.unlink(tmp_path / "best.json")
    run = started(tmp_path, resume_from_checkpoint=True)
    assert run.history.best_checkpoint == str(tmp_path / "step_00000008")


def test_failing_saves_warn_twice_and_then_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = tmp_path / "home"
    run = started(home)
    run.train(4, [0.5])
    moved = home.rename(tmp_path / "gone")
    home.write_text("in the way")
    with caplog.at_level(logging.WARNING, "distributed"):
        assert run.train(4, [0.6]) == [None] * 4
        assert run.progress.best_metric == 0.5  # what was not saved is not the best saved
        home.unlink()
        moved.rename(home)
        assert saved_steps(run.train(4)) == [4]
        home.rename(moved)
        home.write_text("in the way")
        assert run.save_now() is None
        assert run.save_now() is None
        with pytest.raises(FileExistsError):
            run.save_now()
    assert caplog.text.count("not saved") == 4
    assert "failure 3 in a row" in caplog.text
    assert "File exists" in caplog.text
    assert PortableCheckpointer(str(moved), keep_last=None).steps() == [12, 4]  # what was committed stays


def test_a_directory_that_vanishes_in_mid_run_is_made_again(tmp_path: Path) -> None:
    run = started(tmp_path / "home")
    run.train(4)
    shutil.rmtree(tmp_path / "home")
    assert saved_steps(run.train(4)) == [4]
    assert PortableReader(str(tmp_path / "home" / "step_00000008")).step == 8


def test_a_directory_that_cannot_be_had_is_a_user_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = configured(tmp_path / "file" / "checkpoints")
    errors = on_ranks(3, lambda rank, meeting: Run(config, rank, meeting).saver.prepare())
    assert [type(error) for error in errors] == [UserError] * 3
    assert {error.field for error in errors} == {"checkpoint_dir"}
    assert len({str(error) for error in errors}) == 1


def test_a_scheduler_that_cannot_be_saved_is_named_before_training(tmp_path: Path) -> None:
    run = Run(configured(tmp_path))
    run.scheduler.anneal_func = lambda step: step
    with pytest.raises(UserError, match=r"'scheduler\.anneal_func'"):
        run.saver.prepare()


def test_leftovers_are_swept_at_start(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_00000003-0123456789abcdef").mkdir()
    started(tmp_path).saver.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("reading", [1, 2, 3])
@pytest.mark.parametrize("writing", [1, 2, 3])
def test_any_world_goes_on_from_any_other(writing: int, reading: int, tmp_path: Path) -> None:
    def first(rank: int, meeting: Meeting) -> Any:
        run = Run(configured(tmp_path), rank, meeting)
        run.saver.prepare()
        run.train(8, [0.5, 0.6])
        return run.snapshot(), asdict(run.history)

    def second(rank: int, meeting: Meeting) -> Any:
        run = Run(configured(tmp_path, resume_from_checkpoint=True), rank, meeting)
        run.saver.prepare()
        assert run.resumer.resume()
        return run.snapshot(), asdict(run.history)

    before, after = on_ranks(writing, first), on_ranks(reading, second)
    assert all(outcome == before[0] for outcome in before + after)


def test_one_rank_that_meets_another_model_stops_all(tmp_path: Path) -> None:
    started(tmp_path).train(4)

    def go(rank: int, meeting: Meeting) -> None:
        run = Run(configured(None, resume_from_checkpoint=str(tmp_path)), rank, meeting)
        if rank == 1:
            run.backend.module = nn.Linear(2, 1)  # type: ignore[attr-defined]
        run.saver.prepare()
        run.resumer.resume()

    errors = on_ranks(2, go)
    assert [type(error) for error in errors] == [UserError] * 2
    assert str(errors[0]) == str(errors[1])


def test_a_second_fit_goes_on_from_an_exported_state(tmp_path: Path) -> None:
    first = started(tmp_path / "checkpoints")
    first.train(6, [0.5])
    path = first.export_to(str(tmp_path / "private"))
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    second = Run(configured(tmp_path / "checkpoints"))
    second.saver.prepare()
    second.resumer.load(path)
    assert second.snapshot() == first.snapshot()
    second.train(2)
    assert PortableCheckpointer(str(tmp_path / "checkpoints"), keep_last=None).steps() == [8, 4]
    assert second.history.best_checkpoint == str(tmp_path / "checkpoints" / "step_00000004")
    shutil.rmtree(path)
    with pytest.raises(UserError, match="missing"):
        second.resumer.load(path)
