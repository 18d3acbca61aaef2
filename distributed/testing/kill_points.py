"""Training job for kill tests, and the points at which a rank can be killed.

A rank that `arm` has prepared passes named points: around every file operation, in forward and
backward, between the loop's phases. At the point that its job names it sends itself a signal: SIGKILL,
which acts as the operating system would (nothing is flushed, no other process is notified), one that
preempts the run, or SIGSTOP.

The first word of a point is its kind: ``start``, ``resume``, ``step``, ``evaluate``, ``epoch``,
``save``, ``end``.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import Dataset

from distributed import Trainer
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.backend import Window
from distributed.interfaces.callback import Callback, Context
from distributed.registry.catalog import load_target
from distributed.testing.faults import FaultyLayer
from distributed.training.resuming import Resumer
from distributed.training.saving import Saver

__all__ = ["JOB", "LENGTH", "SENT", "VALIDATION", "Switch", "arm", "train"]

JOB = "DISTRIBUTED_KILL_JOB"
"""Environment variable: path of the attempt's job, JSON.

``folder``: where its records go; ``fields``: of the `Trainer`; ``keras``: whether the model is Keras's;
``kill``: ``{"rank", "point", "number", "signal"}`` or None; ``stop``: event and step at which a callback
ends the run, or None; ``sabotage``: ``module:function`` called in every rank before it begins, or None."""

SENT = {
    signal.SIGKILL: "killed",
    signal.SIGSTOP: "suspended",
    **dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), "signalled"),
}
"""Signal -> name of the record of it, whose value is the point."""

LENGTH, VALIDATION, FEATURES = 44, 14, 8
"""Samples, validation samples, numbers of one."""


class Switch:
    """Count how often this rank passes each point, and end it at the chosen one.

    Args:
        job: see `JOB`.
    """

    def __init__(self, job: Mapping[str, Any], rank: int) -> None:
        kill = job["kill"]
        self._chosen = (kill["point"], kill["number"]) if kill and kill["rank"] == rank else None
        self._signal = signal.Signals[kill["signal"]] if kill else None
        self._lock, self.counts = threading.Lock(), Counter[str]()
        self._records = os.path.join(job["folder"], f"rank_{rank}.jsonl")

    def reach(self, point: str) -> None:
        """This rank is at `point`."""
        with self._lock:
            self.counts[point] += 1
            here = self._chosen == (point, self.counts[point])
        if here and self._signal is not None:
            self.record(**{SENT[self._signal]: point}, time=time.time())
            os.kill(os.getpid(), self._signal)

    def record(self, **facts: Any) -> None:
        """Append a line to this rank's records: the kernel has it when this returns."""
        with open(self._records, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


_switch: Switch | None = None


def _reach(point: str) -> None:
    if _switch is not None:
        _switch.reach(point)


def arm() -> Switch:
    """Prepare this process, a rank, for its job; once."""
    global _switch
    if _switch is not None:
        return _switch
    job = _job()
    _switch = Switch(job, int(os.environ.get("RANK", "0")))
    _switch.record(pid=os.getpid())
    for name in (*FaultyLayer.OPERATIONS, "make_directories"):
        folder = os.path.abspath(job["fields"]["checkpoint_dir"])
        setattr(FileLayer, name, _watched(getattr(FileLayer, name), name, folder))
    _around(Saver, "prepare", "start setup: begin", "start setup: end")
    _around(Resumer, "resume", "resume: begin", "resume: end")
    _around(Resumer, "warm_up", "resume: engine cold", "resume: engine warm")
    _around(PortableReader, "__init__", None, "resume: opened")
    _around(PortableReader, "read", None, "resume: a tensor read")
    register_optimizer_step_pre_hook(lambda *_: _reach("step optimizer: begin"))
    register_optimizer_step_post_hook(lambda *_: _reach("step optimizer: end"))
    atexit.register(lambda switch: switch.record(census=dict(switch.counts)), _switch)
    if job["sabotage"]:
        load_target(job["sabotage"])()
    return _switch


def _job() -> dict[str, Any]:
    with open(os.environ[JOB], encoding="utf-8") as file:
        job: dict[str, Any] = json.load(file)
    return job


def _around(owner: Any, name: str, before: str | None, after: str) -> None:
    """Points before and after a method of a class, or of one object."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            _reach(before)
        result = method(*args, **kwargs)
        _reach(after)
        return result

    setattr(owner, name, watched)


# -- files -----------------------------------------------------------------------------------------

_NAMES = {
    r"\.tmp-probe-.*": "start probe",
    r"\.lease-.*|\.tmp-lease-.*": "start lease",
    r"best\.json|\.tmp-best-.*": "save best.json",
    r"shard_.*": "save shard",
    r"rank_.*": "save index",
    r"manifest\.json": "save manifest",
    r"\.gc-.*": "save clean-up",
    r"step_\d+|\.tmp-step_.*": "save step",
}


def _name_of(path: str, folder: str) -> str:
    if not path.startswith(folder):
        return "end result"
    first, *rest = os.path.relpath(path, folder).split("/")
    last = rest[-1] if rest else ""
    for part in (first, last) if "probe" in first else (last, first):
        for pattern, name in _NAMES.items():
            if part and re.fullmatch(pattern, part):
                return name
    return "save directory"


def _path_of(target: Any) -> str:
    return os.readlink(f"/proc/self/fd/{target.fileno()}") if hasattr(target, "fileno") else str(target)


def _watched(method: Callable[..., Any], operation: str, folder: str) -> Callable[..., Any]:
    """A method of `FileLayer` with points before, after, and for a write half-way."""

    @wraps(method)
    def watched(self: FileLayer, target: Any, *args: Any) -> Any:
        place = args[-1] if operation == "rename" else _path_of(target)
        point = f"{_name_of(str(place), folder)} {operation}"
        _reach(f"{point}: begin")
        if operation == "write":
            data = bytes(args[0])
            method(self, target, data[: len(data) // 2])
            target.flush()
            _reach(f"{point}: half")
            args = (data[len(data) // 2 :],)
        result = method(self, target, *args)
        committed = operation == "rename" and re.fullmatch(r"step_(\d+)", os.path.basename(str(place)))
        if committed and _switch is not None and os.path.dirname(str(place)) == folder:
            _switch.record(committed=int(committed[1]))
        _reach(f"{point}: end")
        return result

    return watched


# -- training job ----------------------------------------------------------------------------------


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that carry their index as the last number, with noise from three random generators."""

    def __init__(self, length: int, train: bool) -> None:
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = self.x[:, :4].argmax(dim=1)
        self.train = train

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        _reach("step data" if self.train else "evaluate data")
        noise = random.gauss(0, 0.01) + float(np.random.normal(0, 0.01)) + 0.01 * torch.randn(())
        values = self.x[index] + (noise if self.train else 0.0)
        return torch.cat([values, torch.tensor([float(index)])]), self.y[index]


class Net(nn.Module):
    """Dropout draws; batch statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 32), nn.BatchNorm1d(8)
        self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        phase = "step" if self.training else "evaluate"
        _reach(f"{phase} forward: begin")
        hidden = self.first(x[:, :FEATURES])
        hidden = self.norm(hidden.view(-1, 8, 4)).flatten(1).relu()
        _reach(f"{phase} forward: half")
        hidden = self.dropout(self.second(self.dropout(hidden)).tanh())
        result: Tensor = self.last(hidden)
        if result.requires_grad:
            result.register_hook(lambda _: _reach("step backward: begin"))
            hidden.register_hook(lambda _: _reach("step backward: half"))
        _reach(f"{phase} forward: end")
        return result


def build_model() -> nn.Module:
    """Runs on every rank, which it also arms."""
    arm().reach("start model")
    return Net()


def build_keras_model() -> Any:
    """The like in Keras."""
    import keras

    arm().reach("start model")
    return keras.Sequential(
        [
            keras.Input((FEATURES + 1,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4),
        ]
    )


class Witness(Callback):
    """Record the samples of each step, with a point at every event of the loop."""

    all_ranks = True

    def on_run_start(self, context: Context) -> None:
        switch = arm()
        switch.record(start=context.progress.step, time=time.time())
        self._ids: list[int] = []
        backend: Any = context.backend
        run_window = backend.run_window

        def recorded(window: Window) -> Any:
            for batch, number in window.micro_batches:
                self._ids += np.asarray(batch[0])[:number, -1].astype(int).tolist()
            return run_window(window)

        backend.run_window = recorded
        for point in ("step run_window", "step optimizer_step", "evaluate evaluate_window"):
            _around(backend, point.split()[1], f"{point}: begin", f"{point}: end")
        switch.reach("start: ready")

    def on_step_end(self, context: Context) -> None:
        place = context.progress
        arm().record(step=place.step, epoch=place.epoch, ids=self._ids, time=time.time())
        self._ids = []
        _reach("step end")

    def on_validation_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        _reach("evaluate end")

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        _reach("epoch end")

    def on_checkpoint(self, context: Context, path: str) -> None:
        _reach("save reported")

    def on_run_end(self, context: Context, status: str) -> None:
        _reach("end run")
        arm().record(census=dict(arm().counts))  # Ray ends its workers without their exit functions.


class Stop(Callback):
    """End the run after a step, as the last rank requests.

    Args:
        event: ``epoch`` or ``step``, which ends.
    """

    all_ranks = True

    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step

    def _request(self, event: str, context: Context) -> None:
        last = context.world.rank == context.world.size - 1
        if last and event == self.event and context.progress.step >= self.step:
            context.request_stop("seen enough")

    def on_step_end(self, context: Context) -> None:
        self._request("step", context)

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        self._request("epoch", context)


def train() -> None:
    """Train the job."""
    job = _job()
    build = build_keras_model if job["keras"] else build_model
    callbacks = [Witness(), *([Stop(*job["stop"])] if job["stop"] else [])]
    trainer = Trainer(build, callbacks=callbacks, **job["fields"])
    trainer.fit(Samples(LENGTH, True), Samples(VALIDATION, False))
