"""Train two backends on the same data and record losses, norms, rates and weights of every step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed import Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.config import load, parse_assignments
from distributed.interfaces.history import History
from distributed.interfaces.launcher import Launcher
from distributed.registry.catalog import get_catalog, require
from distributed.system.private_folders import PrivateFolder
from distributed.testing.reference_problem import problem
from distributed.testing.workbench import Workbench, find_workbench

__all__ = ["DTYPES", "Exercise", "Record", "Side", "parse_side", "record"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.float32}
"""Dtype of weights and inputs for each ``--dtype``; bf16 computes in bfloat16 over float32."""


@dataclass(frozen=True)
class Side:
    """One of the two: a backend, its own configuration fields, and how many ranks."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def __str__(self) -> str:
        fields = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.backend}:{fields}" if fields else self.backend


@dataclass(frozen=True)
class Exercise:
    """The training of both sides.

    Attributes:
        steps: optimizer steps.
        global_batch_size: samples per step over all ranks.
        accumulation: micro-batches per step.
        samples: length of the data; unless the global batch divides it, epochs end in a ragged one.
        dtype: a key of `DTYPES`.
        optimizer: a kind of `problem.OPTIMIZERS`.
        learning_rate: learning rate of that optimizer.
        options: configuration fields for both sides, e.g. ``{"gradient_clipping": 0.5}``.
    """

    steps: int = 20
    global_batch_size: int = 24
    accumulation: int = 1
    samples: int = 101
    dtype: str = "float64"
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict)

    def is_ragged(self, step: int) -> bool:
        """Whether step number `step`, from 1, takes the smaller last batch of an epoch."""
        per_epoch = -(-self.samples // self.global_batch_size)
        return bool(self.samples % self.global_batch_size) and step % per_epoch == 0


@dataclass(frozen=True)
class Record:
    """Record of a side.

    Attributes:
        side: side that was trained.
        losses, norms, rates: values per step, from index 0: mean loss over the global batch, gradient
            norm before clipping (NaN where the backend reports none), learning rate.
        weights: weights after each step, in torch's layout; at index 0 the initial ones. None
            where only the final ones are known, which the last entry always holds.
    """

    side: Side
    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: list[list[Tensor] | None]


def parse_side(text: str, ranks: int) -> Side:
    """``NAME`` or ``NAME:field=value,field=value`` as a `Side` of `ranks` ranks; a backend that is
    one process gets 1.

    Raises:
        UserError: no such backend, it is not installed, or no such field.
    """
    name, _, fields = text.partition(":")
    spec = get_catalog().backend(name)
    require(spec.requires, f"backend '{name}'", spec.install_hint)
    options = parse_assignments(part for part in fields.split(",") if part)
    return Side(name, options, ranks if spec.capabilities.multi_process else 1)


def record(
    side: Side, exercise: Exercise, *, every_step: bool = True, launcher: Launcher | None = None
) -> Record:
    """Train `side` and record it.

    Args:
        side: side to train.
        exercise: training of both sides.
        every_step: record weights after every step, by a checkpoint each, where the backend can.
        launcher: starts the ranks instead of the backend's own.

    Raises:
        UserError: the backend cannot do what is asked.
        WorkerError: a rank failed.
    """
    spec = get_catalog().backend(side.backend)
    bench, dtype = find_workbench(spec.framework), DTYPES[exercise.dtype]
    model = bench.model(dtype)
    before = bench.weights(model)
    with PrivateFolder("distributed-parity-") as folder:
        saves = every_step and spec.capabilities.checkpoint
        trainer = _trainer(bench, model, side, exercise, folder if saves else None)
        trainer.launcher = launcher
        # Two runs at once would print over the table; a rank's error comes as an exception.
        with redirect_stdout(StringIO()):
            history = trainer.fit(bench.data(*problem(exercise.samples, dtype)), max_steps=exercise.steps)
        weights = _saved(bench, folder, exercise.steps) if saves else [None] * (exercise.steps - 1)
        return Record(
            side,
            history.steps["loss"],
            _norms(history),
            history.steps["learning_rate"],
            [before, *weights, bench.weights(model)],
        )


def _trainer(bench: Workbench, model: Any, side: Side, exercise: Exercise, folder: str | None) -> Trainer:
    fields: dict[str, Any] = {
        "device": "cpu",
        "tracking.progress": "off",
        "log_every_n_steps": 1,
        "mixed_precision": "bf16" if exercise.dtype == "bf16" else False,
        **exercise.options,
        **side.options,
        "backend": side.backend,
        "num_processes": side.ranks,
        "global_batch_size": exercise.global_batch_size,
        "gradient_accumulation_steps": exercise.accumulation,
        "learning_rate": exercise.learning_rate,
    }
    if folder is not None:
        fields |= {"checkpoint_dir": folder, "checkpoint.every_n_steps": 1, "checkpoint.keep_last": None}
    return Trainer(model, load(overrides=fields), optimizer=bench.optimizer(exercise.optimizer))


def _saved(bench: Workbench, folder: str, steps: int) -> list[list[Tensor] | None]:
    """Weights after each step but the last, which the model itself holds."""
    found: list[list[Tensor] | None] = []
    for step in range(1, steps):
        reader = PortableReader(str(Path(folder, f"step_{step:08d}")))
        found.append(bench.saved_weights(reader))
        reader.close()
    return found


def _norms(history: History) -> list[float]:
    by_step = {int(log["step"]): log["grad_norm"] for log in history.logs if "grad_norm" in log}
    return [by_step.get(int(step), float("nan")) for step in history.steps["step"]]
