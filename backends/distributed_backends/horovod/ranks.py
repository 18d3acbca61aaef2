"""Ranks that Horovod connects: how they meet, and how they exchange values."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from distributed.communication.environment import detect
from distributed.errors import UserError
from distributed.interfaces.collectives import Collectives
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed_backends.horovod.collectives import (
    barrier,
    broadcast_object,
    gather_objects,
    sum_in_place,
    wait,
)
from distributed_backends.horovod.section import HorovodSection
from distributed_backends.horovod.world import start_horovod


class RanksMixin:
    """Meets the other ranks by Horovod, and exchanges plain numbers and objects.

    Attributes:
        store: rendezvous store; None on a single rank, which needs no Horovod.
    """

    world: World
    store: Any = None
    _records = False

    def meet(self, plan: RunPlan, device: str) -> World:
        """Start Horovod on this rank and return the rank's world. Collective.

        Args:
            device: name of this rank's device.

        Raises:
            UserError: ranks are missing, the store cannot be reached, or Horovod lacks the transport.
        """
        place = plan.joined or detect(os.environ)
        if plan.world_size == 1 or place is None:
            return World(host=socket.gethostname(), device=device)
        self.store = start_horovod(place, plan.config)
        _check_transport(plan)
        self._start_timeline(HorovodSection.of(plan.config).timeline)
        return World(
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

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum float64 `values` element by element over all ranks."""
        if self.world.size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        result: list[float] = sum_in_place(tensor, "values").tolist()
        return result

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank."""
        return value if self.world.size == 1 else broadcast_object(value, root, "object")

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        return [value] if self.world.size == 1 else gather_objects(value, "objects")

    def barrier(self) -> None:
        """Return when every rank has called."""
        if self.world.size > 1:
            barrier()

    def end_timeline(self) -> None:
        """End the timeline, if there is one. Horovod itself stays: the user may have started it, and it ends
        with the process."""
        if self._records:
            self._records = False
            hvd.stop_timeline()

    def _start_timeline(self, path: str | None) -> None:
        if path is not None:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            hvd.start_timeline(path)
            self._records = True


class HorovodCollectives(RanksMixin, Collectives):
    """Horovod's collectives for a backend of another framework."""

    def join(self, plan: RunPlan, device: str) -> World:
        self.world = self.meet(plan, device)
        return self.world

    def sum_arrays(self, arrays: Sequence[Any]) -> list[Tensor]:
        sent = []
        for i, array in enumerate(arrays):
            values = torch.from_dlpack(array)
            # Horovod does not have bfloat16.
            wire = values.float() if values.dtype == torch.bfloat16 else values
            sent.append((values.dtype, hvd.allreduce_async(wire, op=hvd.Sum, name=f"array.{i}")))
        return [wait(handle).to(dtype) for dtype, handle in sent]

    def leave(self) -> None:
        self.end_timeline()


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
