"""HorovodBackend: a replica per rank, gradients summed by Horovod while backward runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from distributed.communication.environment import detect
from distributed.errors import UserError
from distributed.interfaces.backend import CommunicationTimes, Window
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.parallel.gradient_reducer import GradientReducer, build_reducer
from distributed.resilience.divergence import trained
from distributed.system.tensors import assign_values
from distributed.training.mixins.accumulation import NO_CONTEXT
from distributed.training.model_traits import COMPLEX, refuse
from distributed.training.process_group_backend import claim_device
from distributed.training.torch_backend import StepModule, TorchBackend
from distributed_backends.horovod.collectives import wait
from distributed_backends.horovod.gradients import GradientSum
from distributed_backends.horovod.ranks import RanksMixin
from distributed_backends.horovod.wire import HorovodWire


class HorovodBackend(RanksMixin, TorchBackend):
    """Horovod sums gradients; everything else is the plain torch backend.

    Under ``deterministic``, tensor fusion is disabled because its grouping depends on timing. BatchNorm
    statistics stay per rank while training; before validation every rank takes rank 0's,
    so that what is validated is what is saved.
    """

    follows_requires_grad = False
    sums_gradients = True
    _gradients: GradientSum | GradientReducer | None = None

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        place = plan.joined or detect(os.environ)
        self.world = self.meet(plan, claim_device(plan, place.local_rank if place else 0))
        return self.world

    def prepare(self, task: Task) -> None:
        if hasattr(task.optimizer, "_allreduce_grad_async"):
            raise UserError(
                "the optimizer is wrapped by Horovod already, and gradients would be summed twice",
                field="optimizer",
                got="hvd.DistributedOptimizer",
                remedy="Give the plain optimizer",
            )
        super().prepare(task)

    def wrap(self, step: StepModule) -> nn.Module:
        if self.world.size == 1:
            return step
        refuse(self.module, "horovod", {COMPLEX: "Horovod does not reduce complex numbers"})
        self.follow_trainable()
        self._broadcast([*self.module.parameters(), *self.module.buffers()])
        return step

    def follow_trainable(self) -> None:
        if self.world.size == 1:
            return
        if self._gradients is not None:
            self._gradients.remove()
            if self.compression is not None:
                self.compression.begin_again()
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        trained: dict[Any, str] = {parameter: names[parameter] for parameter in self._parameters}
        counts = [self.step_module.count] if self.step_module.reduced_count else []
        find_unused = self.config.find_unused_parameters
        if self.compression is None:
            every = {**trained, **dict.fromkeys(counts, "the count of tokens")}
            self._gradients = GradientSum(every, find_unused=find_unused)
        else:
            named = ((name, parameter) for parameter, name in trained.items())
            self._gradients = build_reducer(self, named, HorovodWire(), find_unused)

    # -- one step --------------------------------------------------------------------

    @property
    def placeholders(self) -> str:
        return "zeros" if self.world.size > 1 else "skipped"

    def run_window(self, window: Window) -> tuple[Any, Any]:
        result = super().run_window(window)
        if self._gradients is not None:
            start = perf_counter()
            self.count_first()
            self._gradients.finish()
            self.timers.add("backward", perf_counter() - start)
        return result

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients leave in the backward of the window's last micro-batch only."""
        if self._gradients is not None:
            self._gradients.active = last
        return NO_CONTEXT

    def replicated(self) -> dict[str, Tensor]:
        return trained(self.module)

    def communication_times(self) -> CommunicationTimes | None:
        if self._gradients is None:
            return CommunicationTimes(0.0) if self.world.size == 1 else None
        return self._gradients.times_per_step()

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if not training and self.world.size > 1:
            self._broadcast(self.module.buffers())

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values, in place on every rank."""
        sent = []
        for i, tensor in enumerate(tensors):
            values = tensor.detach()
            # As bytes: Horovod does not know every dtype.
            wire = values.contiguous().reshape(-1).view(torch.uint8)
            if wire.numel():
                sent.append((values, wire, hvd.broadcast_async_(wire, 0, name=f"weights.{i}")))
        for values, wire, handle in sent:
            wait(handle)
            if not values.is_contiguous():
                assign_values(values, wire.view(values.dtype).view(values.shape))

    # -- the end ---------------------------------------------------------------------

    def release(self) -> None:
        super().release()
        if self._gradients is not None:
            self._gradients.remove()

    def teardown(self) -> None:
        self.end_timeline()
        super().teardown()

    def start_outside_fit(self, plan: RunPlan) -> World:
        world = self.setup(plan)
        if not hvd.is_initialized():
            hvd.init()  # `setup` leaves a single rank without Horovod
        return world

    def average_outside_fit(self, value: float, name: str) -> float:
        if not hvd.is_initialized():
            raise UserError(
                "Horovod has not started on these ranks",
                field="metric_average",
                remedy="Call it after `fit`, or call hvd.init() under horovodrun",
            )
        return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name))
