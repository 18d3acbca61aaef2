"""Stepper: one optimizer step at a time, for a loop that the user writes (`Trainer.train_step`)."""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.data.order import share
from distributed.errors import UserError
from distributed.interfaces.backend import MicroBatch, Window
from distributed.registry.catalog import get_catalog
from distributed.training.optimizers import build_scheduler
from distributed.training.step_records import not_finite

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan
    from distributed.interfaces.task import Task

__all__ = ["Stepper"]


class Stepper:
    """A backend, set up in this process and kept until it ends.

    Args:
        config: as for `fit`.
        make_plan: `Trainer._plan`.
        task: the user's objects, without data.

    Raises:
        UserError: the plan would have to start ranks.
    """

    def __init__(self, config: DistributedConfig, make_plan: Callable[..., RunPlan], task: Task) -> None:
        catalog = get_catalog()
        self.config, plan = config, make_plan(config, catalog, task)
        if plan.mode == "spawn":
            raise UserError(
                f"a loop of your own cannot start {plan.world_size} ranks from inside",
                field="num_gpus",
                got=config.num_ranks,
                allowed="1 here, or ranks that a launcher started",
                remedy=f"torchrun --nproc_per_node={plan.local_size} script.py, or use fit",
            )
        self.backend: Any = catalog.load_backend(plan.spec)
        self.backend.setup(plan)
        atexit.register(self.backend.teardown)
        self.backend.prepare(task)
        self.accumulation = plan.batch.gradient_accumulation_steps
        self.scheduler, self.unit = build_scheduler(
            task.scheduler, self.backend.optimizer, config, config.max_steps
        )
        self.backend.set_training(True)

    def step(self, data: Any, target: Any) -> float:
        """Forward, backward and step; the mean loss of this rank's samples.

        Raises:
            UserError: it is not finite and ``on_nan`` is ``stop``; the weights are as before.
        """
        length = len(target)
        spans = [share(length, part, self.accumulation) for part in range(self.accumulation)]
        micro_batches = [
            MicroBatch([data[a:b], target[a:b]] if b > a else [data, target], b - a) for a, b in spans
        ]
        # Nothing says how many samples the other ranks bring, so they are asked.
        total = int(self.backend.all_reduce([float(length)])[0]) // self.backend.world.model_parallel_size
        loss, count = self.backend.run_window(Window(micro_batches, total))
        mean = float(loss) / (float(count) or 1.0)
        if self.config.on_nan == "stop" and not math.isfinite(mean):
            raise not_finite(mean, f"on rank {self.backend.world.rank}", self.backend.optimizer)
        result = self.backend.optimizer_step(self.config.gradient_clipping)
        if not result.skipped and self.scheduler is not None and self.unit == "step":
            self.scheduler.step()
        return mean
