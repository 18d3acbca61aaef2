"""An interrupted and resumed run ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.diff import differences
from distributed.checkpoint.reader import PortableReader
from distributed.errors import WorkerError
from distributed.interfaces.callback import Callback, Context
from distributed.testing.reference_problem import problem
from distributed.testing.suite import Suite

__all__ = ["FailureContracts"]

_STEPS = 8
_KILLED_AFTER = 5
"""Of 25 samples in global batches of 12 an epoch has three steps: the second is under way."""


class Interrupted(Exception):
    """Ends a run that is in the caller's own process, which a kill would take along."""


class Interrupts(Callback):
    """Kills every rank's process after a step, as a host that goes down does. Not one rank's alone:
    how long the others take to detect it depends on the launcher, and would only cost time here."""

    all_ranks = True

    def __init__(self, step: int, kill: bool) -> None:
        self.step, self.kill = step, kill

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == self.step:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted


class FailureContracts(Suite):
    """A run that is killed and restarted."""

    def test_c10_a_killed_run_ends_with_the_same_bits(self, tmp_path: Path) -> None:
        """Under `deterministic`, with random layers: a run that is killed in the middle of an epoch, and
        resumes from its last checkpoint, ends like an uninterrupted one."""
        if not self.capabilities.checkpoint:
            pytest.skip("does not claim checkpoints")
        # Two ranks would hide in which order gradients are added.
        ranks, whole, parts = self.sizes[-1], str(tmp_path / "whole"), str(tmp_path / "parts")
        self._train_noisy(ranks, whole)
        kill = ranks > 1 or self.spec.remote
        with pytest.raises(WorkerError if kill else Interrupted):
            self._train_noisy(ranks, parts, Interrupts(_KILLED_AFTER, kill))
        kept = _newest(parts).step
        assert 0 < kept <= _KILLED_AFTER
        history = self._train_noisy(ranks, parts)
        assert history.steps["step"] == list(range(kept + 1, _STEPS + 1))
        assert list(differences(_newest(whole), _newest(parts))) == []

    def _train_noisy(self, ranks: int, folder: str, *callbacks: Callback) -> Any:
        trainer = self.trainer(
            self.bench.noisy_model(),
            ranks,
            global_batch_size=12,
            gradient_accumulation_steps=1,
            optimizer=self.bench.optimizer("momentum"),
            learning_rate=0.1,
            scheduler="cosine",
            deterministic=True,
            checkpoint_dir=folder,
            resume_from_checkpoint=True,
            # Every step: a killed run has at least the checkpoint of the step before the last.
            checkpoint={"every_n_steps": 1, "asynchronous": False},
        )
        trainer.callbacks = list(callbacks)
        return trainer.fit(self.bench.data(*problem(25, torch.float32)), max_steps=_STEPS)


def _newest(folder: str) -> PortableReader:
    path = PortableCheckpointer(folder, keep_last=None).latest()
    assert path is not None, f"no checkpoint in {folder}"
    return PortableReader(path)
