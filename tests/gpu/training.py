"""Trained weights against the CPU oracle, and runs that are killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.product import (
    Callback,
    PortableCheckpointer,
    PortableReader,
    WorkerError,
    differences,
    distance,
    oracle_fit,
    problem,
)
from tests.gpu.ranks import number_of_ranks, trainer

__all__ = ["parity", "resume"]

_STEPS = 12
_KILLED_AFTER = 7
"""In the second epoch of three."""


def _model(width: int, dropout: float, dtype: torch.dtype) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3)
        ).to(dtype)  # fmt: skip


def parity(setting: Settings, backend: str, transport: str) -> Iterator[Measured]:
    """Momentum SGD with clipping, two micro-batches a step, a ragged last batch; float64."""
    ranks = number_of_ranks(setting, backend, transport)
    batch, steps, width = 12 * ranks, setting.pick(40, 8), setting.pick(256, 16)
    data = problem(5 * batch + 1)
    model, reference = (_model(width, 0.0, torch.float64) for _ in range(2))
    ours = trainer(
        setting,
        model,
        backend,
        transport,
        global_batch_size=batch,
        gradient_accumulation_steps=2,
        optimizer="sgd",
        momentum=0.9,
        learning_rate=0.1,
        gradient_clipping=0.5,
    )
    history = ours.fit(data, max_steps=steps)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    seen = oracle_fit(reference, optimizer, *data, global_batch_size=batch, steps=steps, max_norm=0.5)
    losses = max(abs(a - b) for a, b in zip(history.steps["loss"], seen.losses, strict=True))
    found = distance(model.to("cpu"), reference)
    yield Measured(max(found, losses), f"{ranks} ranks, {steps} steps; losses within {losses:.1e}")


class Kill(Callback):
    """Kills every rank's process after a step, as a host that goes down does."""

    all_ranks = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: Any) -> None:
        if context.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def resume(setting: Settings, backend: str, transport: str) -> Iterator[Measured]:
    """A run with dropout and asynchronous saves, left alone and killed in the middle."""
    home = setting.folder / f"resume-{backend}-{transport}"
    shutil.rmtree(home, ignore_errors=True)
    whole, parts = home / "whole", home / "parts"
    _train(setting, backend, transport, whole)
    _train_and_kill(setting, backend, transport, parts)
    kept = _newest(parts).step
    if not 0 < kept <= _KILLED_AFTER:
        raise RuntimeError(f"killed after step {_KILLED_AFTER}, and the newest checkpoint is of step {kept}")
    history = _train(setting, backend, transport, parts)
    first = int(history.steps["step"][0])
    if first != kept + 1:
        raise RuntimeError(f"the newest checkpoint is of step {kept}, and the run resumed at step {first}")
    found = list(differences(_newest(whole), _newest(parts)))
    ranks = number_of_ranks(setting, backend, transport)
    shutil.rmtree(home)
    yield Measured(
        len(found), f"{ranks} ranks, resumed from step {kept}; {'; '.join(found[:2])}".rstrip("; ")
    )


def _train(setting: Settings, backend: str, transport: str, folder: Path, *callbacks: Callback) -> Any:
    batch = 4 * number_of_ranks(setting, backend, transport)
    ours = trainer(
        setting,
        _model(setting.pick(256, 16), 0.2, torch.float32),
        backend,
        transport,
        global_batch_size=batch,
        gradient_accumulation_steps=1,
        learning_rate=0.01,
        scheduler="cosine",
        deterministic=True,
        # A rank alone is a process of its own, too: the caller has to outlive the kill.
        launch="auto" if backend == "serial" else "spawn",
        checkpoint_dir=str(folder),
        resume_from_checkpoint=True,
        checkpoint={"every_n_steps": 2, "asynchronous": True},
    )
    ours.callbacks = list(callbacks)
    return ours.fit(problem(4 * batch - 1, torch.float32), max_steps=_STEPS)


def _train_and_kill(setting: Settings, backend: str, transport: str, folder: Path) -> None:
    if backend == "serial":
        _kill_a_process(setting, folder)
        return
    try:
        _train(setting, backend, transport, folder, Kill(_KILLED_AFTER))
    except WorkerError:
        return
    raise RuntimeError("every rank was killed, and fit returned")


def _kill_a_process(setting: Settings, folder: Path) -> None:
    """The serial backend trains in the caller's process: that one has to be killed."""
    text = json.dumps({"settings": setting.as_dict(), "folder": str(folder)})
    code = subprocess.run([sys.executable, "-m", "tests.gpu.training", text], check=False).returncode
    if code != -signal.SIGKILL:
        raise RuntimeError(f"a process that kills itself ended with {code}")


def _newest(folder: Path) -> PortableReader:
    path = PortableCheckpointer(str(folder), keep_last=None).latest()
    if path is None:
        raise RuntimeError(f"no checkpoint in {folder}")
    return PortableReader(path)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    _train(Settings(**job["settings"]), "serial", "default", Path(job["folder"]), Kill(_KILLED_AFTER))
