"""Under ``deterministic`` a run that goes on does so with the same bits (C10), on three ranks: two
would hide in which order gradients are added."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

from distributed import Callback, Preempted, Trainer
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import load_full_model
from distributed.interfaces.callback import Context
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.rank_pool import RankPool
from tests.support import commands
from tests.support.training import make_trainer

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(dim=1)


class Net(nn.Module):
    """Counts its training forwards in a buffer that is not persistent, in an attribute, and in a file by
    process, which nothing puts back."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(4), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.forwards += 1
            with open(f"{self.file}.{os.getpid()}", "a") as file:
                file.write(".")
        hidden = self.norm(self.first(x).view(-1, 4, 4)).flatten(1)
        result: Tensor = self.last(self.drop(hidden.tanh()))
        return result


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


class AsIfNothingHadHappened(Callback):
    """Raises where there were not so many forwards before the first step, or a trace of them is left."""

    all_ranks = True

    def __init__(self, forwards: int, resumed: int = 0) -> None:
        self.forwards, self.resumed = forwards, resumed

    def on_run_start(self, context: Context) -> None:
        model = context.model
        file = Path(f"{model.file}.{os.getpid()}")
        forwards = file.stat().st_size if file.exists() else 0
        if forwards != self.forwards:
            raise RuntimeError(f"{forwards} forwards before the first step, and not {self.forwards}")
        found = model.forwards, float(model.calls), [p.grad for p in model.parameters()]
        if found != (self.resumed, float(self.resumed), [None] * 6):
            raise RuntimeError(f"the warm-up left {found}")


def fit(pool: RankPool, folder: Path, steps: int, data: Any = (X, Y), **given: Any) -> None:
    fields = {"deterministic": True, "momentum": 0.9, "optimizer": "sgd"}
    make_trainer(
        partial(Net, f"{folder}{steps}"), 3, pool, folder=folder,
        global_batch_size=12, learning_rate=0.1, gradient_accumulation_steps=2, resume_from_checkpoint=True,
        **{**fields, **given},
    ).fit(data, max_steps=steps)  # fmt: skip


def newest(folder: Path) -> PortableReader:
    path = PortableCheckpointer(str(folder), keep_last=None).latest()
    assert path is not None
    return PortableReader(path)


@pytest.mark.parametrize("data", [(X, Y), Stream()], ids=["tensors", "stream"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    data: Any, rank_pool: RankPool, tmp_path: Path
) -> None:
    fit(rank_pool, tmp_path / "whole", 9, data, callbacks=[AsIfNothingHadHappened(0)])
    # Within an epoch; the step goes by while the schedule is constant.
    fit(rank_pool, tmp_path / "parts", 6, data)
    fit(rank_pool, tmp_path / "parts", 9, data, callbacks=[AsIfNothingHadHappened(1, resumed=11)])
    assert list(differences(newest(tmp_path / "whole"), newest(tmp_path / "parts"))) == []


class Signal(Callback):
    """Send SIGTERM to the last rank, in an event of the loop after a step; only once."""

    all_ranks = True

    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step

    def _act(self, event: str, context: Context) -> None:
        last = context.world.rank == context.world.size - 1
        if last and (event, context.progress.step) == (self.event, self.step):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, context: Context) -> None:
        self._act("step", context)

    def on_validation_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._act("validation", context)

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._act("epoch", context)

    def on_checkpoint(self, context: Context, path: str) -> None:
        self._act("save", context)


def epochs_of(pool: RankPool, folder: Path, *, ranks: int = 3, model: Any = None, **given: Any) -> list[Any]:
    """The epochs of a run of three epochs of four steps, up to its end or its preemption."""
    data = (X, Y) if model is None else problem(40)
    trainer = make_trainer(
        model or partial(Net, str(folder)), ranks, pool, folder=folder,
        global_batch_size=12, gradient_accumulation_steps=2, epochs=3, learning_rate=0.1,
        optimizer=partial(torch.optim.SGD, momentum=0.9), deterministic=True,
        scheduler=partial(StepLR, step_size=1, gamma=0.5), resume_from_checkpoint=True, **given,
    )  # fmt: skip
    try:
        return trainer.fit(data, data).epochs
    except Preempted:
        assert trainer.history is not None
        return trainer.history.epochs


ENDS = [("step", 6, 1), ("step", 4, 1), ("step", 4, 50), ("step", 12, 1),
        ("validation", 8, 1), ("epoch", 8, 1), ("save", 8, 1)]  # fmt: skip


def test_a_signal_at_the_end_of_an_epoch_changes_no_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    """In mid-epoch, in the last step of an epoch and of the run, in validation, in the save of an epoch."""
    for every in (1, 50):
        alone = epochs_of(rank_pool, tmp_path / f"whole{every}", log_every_n_steps=every)
    for event, step, every in ENDS:
        folder = tmp_path / f"{event}{step}{every}"
        fields: dict[str, Any] = {"log_every_n_steps": every, "checkpoint": {"asynchronous": event != "save"}}
        first = epochs_of(rank_pool, folder, callbacks=[Signal(event, step)], **fields)
        assert newest(folder).step < 12 or step == 12, (event, step)
        rest = epochs_of(rank_pool, folder, **fields)
        assert [*first, *rest] == alone, (event, step)
        found = {path.name: PortableReader(str(path)) for path in folder.glob("step_*")}
        for name in ("step_00000008", "step_00000012"):  # that of step 4 is gone, or has been replaced
            whole = PortableReader(str(tmp_path / f"whole{every}" / name))
            assert list(differences(whole, found[name])) == [], (event, step, name)
        assert epochs_of(rank_pool, folder, **fields) == []
        assert not list(folder.glob("superseded_*"))
        assert [len(list(path.rglob("shard_*"))) for path in folder.glob("step_*")] == [3, 3, 3], event


@pytest.mark.parametrize("step", [4, 12])
def test_the_end_of_an_epoch_comes_on_another_number_of_ranks(
    step: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    epochs_of(rank_pool, tmp_path / "whole", ranks=2, model=small_model)
    epochs_of(rank_pool, tmp_path / "parts", model=small_model, callbacks=[Signal("step", step)])
    epochs_of(rank_pool, tmp_path / "parts", ranks=2, model=small_model)
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole.extra["progress"] == pytest.approx(parts.extra["progress"])
    assert whole.extra["scheduler"] == parts.extra["scheduler"]
    models = [small_model(), small_model()]
    for reader, model in zip((whole, parts), models, strict=True):
        load_full_model(reader, model)
    assert distance(*models) < 1e-9


def test_nothing_is_warmed_up_where_nobody_asked_for_bits(rank_pool: RankPool, tmp_path: Path) -> None:
    for folder, given in (("two", {"num_processes": 2}), ("loose", {"deterministic": False})):
        fit(rank_pool, tmp_path / folder, 3, **given)
        fit(rank_pool, tmp_path / folder, 4, callbacks=[AsIfNothingHadHappened(0, resumed=6)], **given)


TWICE = """
import os, sys, torch
from torch import nn
from distributed import Trainer

def trained(*parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    trainer = Trainer(model, global_batch_size=12, device="cpu", deterministic=True, learning_rate=0.1)
    for steps in parts:
        trainer.fit((x, y), max_steps=steps)
    return torch.cat([p.detach().flatten() for p in model.parameters()])

x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(dim=1)
torch.distributed.init_process_group("gloo")
whole, parts = trained(9), trained(6, 3)
print("same" if torch.equal(whole, parts) else f"differ by {float((whole - parts).abs().max())}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.starts_processes
def test_a_second_fit_in_ranks_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    command = f"train --script {tmp_path / 'twice.py'} --launch per-rank --num-processes 3 --device cpu"
    done = commands.run([sys.executable, "-m", "distributed.cli", *command.split()], capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.removeprefix(f"[rank {rank}] ") for rank in range(3) for line in done.stdout.splitlines()]
    assert "same" in said
    assert "differ" not in done.stdout


class Draws(Callback):
    """As a library does that is imported when a run begins."""

    def on_run_start(self, context: Context) -> None:
        random.random()
        torch.rand(())


def test_what_a_callback_draws_at_the_start_is_no_part_of_the_run() -> None:
    found = []
    for callbacks in ([], [Draws()]):
        model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        Trainer(
            model, num_processes=1, batch_size=8, deterministic=True, device="cpu", callbacks=callbacks
        ).fit((X, Y))  # fmt: skip
        found.append(model[0].weight.detach().clone())
    assert torch.equal(*found)
