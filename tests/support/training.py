"""Trainers with the defaults of most tests, and callbacks that several tests use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Callback, Trainer
from distributed.interfaces.callback import Context
from distributed.interfaces.launcher import Launcher

__all__ = ["Die", "OnStep", "SameWeights", "make_trainer"]


def make_trainer(
    model: Any,
    ranks: int = 1,
    pool: Launcher | None = None,
    *,
    folder: Path | None = None,
    kind: Callable[..., Trainer] = Trainer,
    **given: Any,
) -> Trainer:
    """A trainer of `model` on CPUs that logs every step and shows no progress.

    Args:
        model: what to train, or a factory of it.
        ranks: number of processes.
        pool: where the ranks run; without it, every fit starts processes of its own.
        folder: the checkpoint directory.
        kind: class of the trainer.
        given: its further arguments, which override the defaults.
    """
    fields = {
        "num_processes": ranks,
        "device": "cpu",
        "log_every_n_steps": 1,
        "tracking": {"progress": "off"},
    }
    if folder is not None:
        fields["checkpoint_dir"] = folder
    trainer = kind(model, **{**fields, **given})
    trainer.launcher = pool
    return trainer


class OnStep(Callback):
    """Call `act(context)` after a step on a rank; by default after every step on every rank."""

    def __init__(self, act: Callable[[Any], Any], step: int | None = None, rank: int | None = None) -> None:
        self.act, self.step, self.rank = act, step, rank
        self.all_ranks = rank != 0

    def on_step_end(self, context: Context) -> None:
        if self.step in (None, context.progress.step) and self.rank in (None, context.world.rank):
            self.act(context)


class Die(OnStep):
    """Send a rank SIGKILL, or another signal, after a step."""

    def __init__(self, step: int, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        super().__init__(partial(_send_signal, number), step, rank)


def _send_signal(number: int, context: Context) -> None:
    os.kill(os.getpid(), number)


class SameWeights(Callback):
    """Fail the run after a step, or at its end, where ranks have weights of other bits than rank 0."""

    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        weights = [p.detach().numpy().tobytes() for p in context.model.parameters()]
        found = context.backend.gather_objects(weights)
        assert all(others == found[0] for others in found)

    def on_run_end(self, context: Context, status: str) -> None:
        if status == "finished":
            self.on_step_end(context)
