"""Stepper: one optimizer step at a time, for a loop that the user writes (`Trainer.train_step`)."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
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
        # What the backward passes of other models have left here is not of this step.
        self.backend.clear_gradients()
        (record,) = self.loop.steps([self._window(data, target)], check_losses=True)
        return record.loss

    def _window(self, data: Any, target: Any) -> Window:
        length = _num_rows(data, target)
        micro_batches = [MicroBatch([data, target], length)] if self.accumulation == 1 else []
        if not micro_batches:
            spans = [share(length, part, self.accumulation) for part in range(self.accumulation)]
            for a, b in spans:
                which = slice(a, b) if b > a else slice(None)
                batch = [_rows(part, length, which) for part in (data, target)]
                micro_batches.append(MicroBatch(batch, b - a))
        # Only the other ranks know how many samples they bring.
        total = int(self.backend.all_reduce([float(length)])[0]) // self.backend.world.model_parallel_size
        return Window(micro_batches, total)


def _num_rows(data: Any, target: Any) -> int:
    """Number of samples, as inputs and target have it: the rows of a tensor, or the elements of a list."""
    known = _lengths(data)
    return next((number for number in _lengths(target) if number in known), len(target))


def _lengths(value: Any) -> list[int]:
    """Numbers of samples that `value` may have, the likelier first."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(parts, (tuple, list)):
        inside = [set(_lengths(part)) for part in parts if hasattr(part, "__len__")]
        common = sorted(set.intersection(*inside)) if inside else []
        if isinstance(value, Mapping):
            return common
        return [len(parts), *common] if isinstance(parts, list) else [*common, len(parts)]
    if (
        isinstance(value, (str, bytes))
        or not hasattr(value, "__len__")
        or getattr(value, "shape", None) == ()
    ):
        return []
    return [len(value)]


def _rows(value: Any, length: int, which: slice) -> Any:
    """`which` of the `length` samples of each part of a batch; numbers and None are the same for all.

    Raises:
        UserError: a part has another number of samples.
    """
    if isinstance(value, Mapping):
        return {name: _rows(part, length, which) for name, part in value.items()}
    columns = isinstance(value, tuple) and length in _lengths(value)[:-1]
    if isinstance(value, (tuple, list)) and (columns or len(value) != length):
        parts = [_rows(part, length, which) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    lengths = _lengths(value)
    if lengths and length not in lengths:
        raise UserError(
            f"a {type(value).__name__} of the batch has {lengths[0]} samples and the target {length}, so that"
            " it cannot be divided into micro-batches",
            field="gradient_accumulation_steps",
            allowed="1, or data whose parts all have the samples of the target",
            remedy="Set gradient_accumulation_steps=1, or call train_step with the samples in dimension 0",
        )
    return value[which] if lengths else value
