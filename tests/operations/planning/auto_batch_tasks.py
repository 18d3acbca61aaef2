"""Tasks and plans of ``batch_size=auto`` for its tests."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distributed.config import load
from distributed.data import Source
from distributed.errors import WorkerError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.auto_batch import probe_step
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from tests.support.limited_memory import LimitedData, WideModel

__all__ = [
    "MIB",
    "WHOLE",
    "Drawing",
    "everything",
    "failed_rank",
    "in_this_process",
    "plan_of",
    "same",
    "task_of",
    "wide_model",
]

MIB = 1 << 20
WHOLE = 64
"""Samples of a global batch."""


def wide_model() -> WideModel:
    torch.manual_seed(0)
    return WideModel()


class Drawing(nn.Module):
    """Draws random numbers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 1, dtype=torch.float64), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.layer(x)) * self.scale
        return found


def everything(task: Task) -> list[Any]:
    """All that a probe could leave in this process."""
    model = task.model
    return [
        copy.deepcopy(model.state_dict()),
        [p.grad for p in model.parameters()],
        copy.deepcopy(task.optimizer.state_dict()),
        torch.get_rng_state(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        random.getstate(),
        model.training,
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def plan_of(**fields: Any) -> RunPlan:
    given = {"backend": "serial", "device": "cpu", "batch_size": "auto", "global_batch_size": WHOLE, **fields}
    return resolve(load(overrides=given), get_catalog(), Facts(), Resources())


def task_of(model: nn.Module, **fields: Any) -> Task:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Source.of(LimitedData(WHOLE, {}), "train_loader")
    return Task(
        **{"model": model, "optimizer": optimizer, "loss_fn": nn.MSELoss(), "train_data": data, **fields}
    )


def in_this_process(plan: RunPlan, task: Task, folder: Path) -> None:
    """The mutant of a probe: it trains with the objects of the run."""
    backend = get_catalog().load_backend(plan.spec)
    backend.setup(plan)
    probe_step(plan, task, backend, folder, needs="in a test")
    backend.teardown()


def failed_rank(exc_type: str = "MemoryError") -> WorkerError:
    return WorkerError(f"rank 0 raised {exc_type}: far too large", rank=0, host="here", exc_type=exc_type)
