"""PlanMemory: predict the memory of a rank for plans of one task, from facts of the task's own objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.task_facts import TaskFacts
from distributed.planner.estimates.device_memory import CUDA, HOST
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.split_of_plan import split_of

__all__ = ["UNTRIED", "PlanMemory", "held_on_host", "in_units"]

UNTRIED = {"cpu": 0.5, "cuda": 0.85}
"""Device -> share of the memory there is that is used where no step is tried: what the allocator loses
between tensors is not predicted. Memory that glibc has freed stays in its heap: peaks of three runs on CPUs
were 1.8 to 2.2 times what was predicted, and 1.2 to 1.4 times with a mapping for each tensor."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class PlanMemory:
    """Predicts from the task's model, its loss and its first samples. Facts are collected once for each
    precision and optimizer.

    Args:
        task: the objects of the run.
    """

    def __init__(self, task: Task) -> None:
        self._facts = TaskFacts(task, remedy="Set batch_size to a number")

    def model(self, plan: RunPlan) -> nn.Module:
        """The model of the task; that of a factory is built without data."""
        return self._facts.model(plan.config)

    def samples(self) -> Any:
        """The first samples, as the data loader yields them.

        Raises:
            UserError: the data is a stream.
        """
        return self._facts.samples()

    def parts(self, plan: RunPlan) -> MemoryParts:
        """Memory of the rank that needs most, at the peak of a step.

        Raises:
            UserError: it is not predicted; the message says why.
        """
        split = split_of(plan)
        split = replace(split, optimizer=self._facts.optimizer(plan.config)[0])
        device = "cpu" if plan.device == "cpu" else "cuda"
        source = self._facts.source(plan.config, split.precision, device)
        return predict_memory(source, split, HOST if device == "cpu" else CUDA)


def held_on_host(task: Task) -> int:
    """Bytes of the model of `task` that are in host memory already; 0 for a factory."""
    if not isinstance(task.model, nn.Module):
        return 0
    tensors = (*task.model.parameters(), *task.model.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")


def in_units(nbytes: int) -> str:
    """``1.4 GiB``: three digits."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:,.0f} {name}"
    return f"{nbytes} B"
