"""Stepper: one optimizer step at a time, for a loop that the user writes (`Trainer.train_step`)."""

from __future__ import annotations

import atexit
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
        length = len(target)
        spans = [share(length, part, self.accumulation) for part in range(self.accumulation)]
        micro_batches = [
            MicroBatch([data[a:b], target[a:b]] if b > a else [data, target], b - a) for a, b in spans
        ]
        # Only the other ranks know how many samples they bring.
        total = int(self.backend.all_reduce([float(length)])[0]) // self.backend.world.model_parallel_size
        return Window(micro_batches, total)
