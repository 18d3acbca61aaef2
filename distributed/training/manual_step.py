"""Stepper: one optimizer step at a time, for a loop that the user writes (`Trainer.train_step`)."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.data.order import share
from distributed.errors import UserError
from distributed.interfaces.backend import MicroBatch, Window
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.registry.catalog import Catalog
from distributed.training.loop import TrainingLoop


class Stepper:
    """A training loop without data, set up in this process and kept until it ends.

    Args:
        task: the user's objects, without data.

    Raises:
        UserError: the plan would have to start ranks.
    """

    def __init__(self, plan: RunPlan, task: Task, catalog: Catalog) -> None:
        if plan.mode == "spawn":
            raise UserError(
                f"a loop of your own cannot start {plan.world_size} ranks from inside",
                field="num_gpus",
                got=plan.config.num_ranks,
                allowed="1 here, or ranks that a launcher started",
                remedy=f"torchrun --nproc_per_node={plan.local_size} script.py, or use fit",
            )
        if plan.micro_batches:
            raise UserError(
                "a loop of your own brings batches of its own size, so that there is no size to choose",
                field="batch_size",
                got="auto",
                allowed="a number, or nothing",
                remedy="Leave batch_size out, or use fit",
            )
        if plan.config.low_communication.is_active:
            raise UserError(
                "ranks that train on their own are made equal where an epoch or the training ends, which a"
                " loop of your own does not report",
                field="low_communication.mode",
                got=plan.config.low_communication.mode,
                allowed="none",
                remedy="Use fit, or set low_communication.mode=none",
            )
        self.backend: Any = catalog.load_backend(plan.spec)
        self.backend.setup(plan)
        atexit.register(self.backend.teardown)
        self.accumulation = plan.batch.gradient_accumulation_steps
        self.loop = TrainingLoop(plan, task, self.backend, catalog)
        self.loop.prepare()
        self.backend.set_training(True)

    def step(self, data: Any, target: Any) -> float:
        """Forward, backward and step; the mean loss of this rank's samples.

        Raises:
            UserError: it is not finite and ``on_nan`` is ``stop``; the weights are as before.
        """
        (record,) = self.loop.steps([self._window(data, target)], check_losses=True)
        return record.loss

    def _window(self, data: Any, target: Any) -> Window:
        length = _num_rows(target) or 0
        if self.accumulation == 1:
            micro_batches = [MicroBatch([data, target], length)]
        else:
            spans = [share(length, part, self.accumulation) for part in range(self.accumulation)]
            micro_batches = [
                MicroBatch(_rows([data, target], length, slice(a, b) if b > a else slice(None)), b - a)
                for a, b in spans
            ]
        # Only the other ranks know how many samples they bring.
        total = int(self.backend.all_reduce([float(length)])[0]) // self.backend.world.model_parallel_size
        return Window(micro_batches, total)


def _num_rows(value: Any) -> int | None:
    """Length of the first dimension of a batch in nested mappings, tuples and lists; None of a number."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(parts, (tuple, list)):
        found = {_num_rows(part) for part in parts} - {None}
        return found.pop() if len(found) == 1 else len(parts)
    return None if isinstance(value, (str, bytes)) or not getattr(value, "shape", True) else _length(value)


def _length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") else None


def _holds_rows(value: Sequence[Any], length: int) -> bool:
    """A list holds a row in each element, rather than parts with all rows."""
    return len(value) == length and {_num_rows(part) for part in value} - {None} != {length}


def _rows(value: Any, length: int, which: slice) -> Any:
    """`which` of the `length` rows of each part of a batch; numbers and None are the same for all rows.

    Raises:
        UserError: a part has another number of rows.
    """
    if isinstance(value, Mapping):
        return {name: _rows(part, length, which) for name, part in value.items()}
    num_rows = _num_rows(value)
    if isinstance(value, (tuple, list)) and not _holds_rows(value, length):
        parts = [_rows(part, length, which) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if num_rows not in (None, length):
        raise UserError(
            f"a {type(value).__name__} of the batch has {num_rows} rows and the target {length}, so that it"
            " cannot be divided into micro-batches",
            field="gradient_accumulation_steps",
            allowed="1, or data whose parts all have the rows of the target",
            remedy="Set gradient_accumulation_steps=1, or call train_step with the samples in dimension 0",
        )
    return value if num_rows is None else value[which]
