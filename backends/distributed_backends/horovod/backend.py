"""HorovodBackend: a replica per rank, gradients summed by Horovod while backward runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from distributed.training.model_traits import COMPLEX, refuse
from distributed.training.process_group_backend import claim_device
from distributed.training.torch_backend import StepModule, TorchBackend
from distributed_backends.horovod.collectives import (
    barrier,
    broadcast_object,
    gather_objects,
    sum_in_place,
    wait,
)
from distributed_backends.horovod.gradients import GradientSum
from distributed_backends.horovod.section import HorovodSection
from distributed_backends.horovod.wire import HorovodWire
from distributed_backends.horovod.world import start_horovod


class HorovodBackend(TorchBackend):
    """Horovod sums gradients; everything else is the plain torch backend.

    Under ``deterministic``, tensor fusion is disabled because its grouping depends on timing. BatchNorm
    statistics stay per rank while training; before validation every rank takes rank 0's,
    so that what is validated is what is saved.

    Attributes:
        store: rendezvous store; None on a single rank, which needs no Horovod.
    """

    sums_gradients = True
    store: Any = None
    _gradients: GradientSum | GradientReducer | None = None
    _records = False

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        place = plan.joined or detect(os.environ)
        device = claim_device(plan, place.local_rank if place else 0)
        if plan.world_size == 1 or place is None:
            self.world = World(host=socket.gethostname(), device=device)
            return self.world
        self.store = start_horovod(place, self.config)
        _check_transport(plan)
        self.world = World(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            host=socket.gethostname(),
            device=device,
            data_parallel_rank=place.rank,
            data_parallel_size=place.size,
        )
        self._start_timeline()
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
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        trained: dict[Any, str] = {parameter: names[parameter] for parameter in self._parameters}
        counts = [step.count] if step.reduced_count else []
        find_unused = self.config.find_unused_parameters
        if self.compression is None:
            every = {**trained, **dict.fromkeys(counts, "the count of tokens")}
            self._gradients = GradientSum(every, find_unused=find_unused)
        else:
            named = ((name, parameter) for parameter, name in trained.items())
            self._gradients = build_reducer(self, named, HorovodWire(), find_unused)
        self._broadcast([*self.module.parameters(), *self.module.buffers()])
        return step

    # -- one step --------------------------------------------------------------------

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
        return nullcontext()

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

    # -- cooperation -----------------------------------------------------------------

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        if self.world.size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        result: list[float] = sum_in_place(tensor, "values").tolist()
        return result

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value if self.world.size == 1 else broadcast_object(value, root, "object")

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] if self.world.size == 1 else gather_objects(value, "objects")

    def barrier(self) -> None:
        if self.world.size > 1:
            barrier()

    # -- the end ---------------------------------------------------------------------

    def release(self) -> None:
        super().release()
        if self._gradients is not None:
            self._gradients.remove()

    def teardown(self) -> None:
        # Horovod itself stays: the user may have started it, and it ends with the process.
        if self._records:
            self._records = False
            hvd.stop_timeline()
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

    def _start_timeline(self) -> None:
        path = HorovodSection.of(self.config).timeline
        if path is not None:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            hvd.start_timeline(path)
            self._records = True


def _check_transport(plan: RunPlan) -> None:
    """Check that Horovod was built with the requested transport.

    Raises:
        UserError: this Horovod has no NCCL or no MPI.
    """
    asked = plan.communication_backend
    built = {"gloo": hvd.gloo_built(), "nccl": hvd.nccl_built(), "mpi": hvd.mpi_built()}
    if not built[asked]:
        raise UserError(
            f"this Horovod was built without {asked}",
            field="communication_backend",
            got=asked,
            allowed=", ".join(name for name, there in built.items() if there),
            remedy="Rebuild it where the library is installed (make horovod), or use device=cpu",
        )
