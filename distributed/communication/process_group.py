"""GroupMixin: a torch process group for the ranks of any framework."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distributed.communication.rendezvous import await_ranks, meeting_place, open_store
from distributed.interfaces.parallel_dims import DATA_AXES
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.system.addresses import is_loopback, loopback_interface
from distributed.system.descriptors import allow_descriptors

_SETTLE = 0.1
"""Seconds to wait for gloo's threads after the group is destroyed."""


class GroupMixin:
    """Joins the default process group, or uses the existing one.

    Attributes:
        store: rendezvous store; None with an existing group or without one.

    Collectives on plain numbers and objects use gloo, also beside nccl, so that logging
    never waits for the GPU's stream.
    """

    world: World
    store: dist.Store | None = None
    _owns_group = False

    def meet(self, plan: RunPlan, kind: str, device: str) -> World:
        """Join the other ranks and return this rank's world. Collective.

        Args:
            kind: torch's name of the group's backend.

        Raises:
            UserError: ranks are missing, or the store cannot be reached.
        """
        if plan.world_size > 1 and not dist.is_initialized():
            self._owns_group = True
            self._open_group(plan, kind)
        # A single rank needs no group, and leaves the caller's process without one.
        rank, size = (dist.get_rank(), dist.get_world_size()) if plan.world_size > 1 else (0, 1)
        local_size = plan.local_size
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank_of(plan),
            local_size=local_size,
            node_rank=plan.node_rank,
            num_nodes=plan.num_nodes,
            host=socket.gethostname(),
            device=device,
            data_parallel_rank=plan.dims.index(rank, *DATA_AXES),
            data_parallel_size=plan.dims.data_parallel_size,
            num_replicas=plan.num_replicas,
        )

    def _open_group(self, plan: RunPlan, kind: str) -> None:
        timeout = timedelta(seconds=plan.config.collective_timeout)
        rank, size = (
            (plan.joined.rank, plan.joined.size)
            if plan.joined
            else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        )
        if plan.num_nodes == 1 and is_loopback(meeting_place(plan.joined)[0]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        self.store = open_store(plan.joined, rank, size, timeout)
        await_ranks(self.store, rank, size, plan.config.collective_timeout)
        allow_descriptors(size)  # gloo connects every rank with every other one
        dist.init_process_group(
            kind, store=dist.PrefixStore("group", self.store), rank=rank, world_size=size, timeout=timeout
        )

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum float64 `values` element by element over all ranks."""
        if self.world.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank."""
        if self.world.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=root, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.world.size == 1:
            return [value]
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Return when every rank has called."""
        if self.world.size > 1:
            self.all_reduce([0.0])

    def teardown(self) -> None:
        """Leave the group, if `meet` made it."""
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            destroy_group()


def destroy_group() -> None:
    """Destroy the default process group, and wait until its threads have ended."""
    # gloo's threads release their last work under the interpreter's lock: freeing the group meanwhile
    # deadlocks, and a thread that acquires it while the interpreter shuts down aborts the process.
    group, size = dist.group.WORLD, dist.get_world_size()
    dist.destroy_process_group()
    if size > 1:
        time.sleep(_SETTLE)
    del group


def num_collectives() -> int:
    """Number of collectives that this rank has begun, in the groups of torch.distributed that count them."""
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    number = 0
    for group in groups:
        with suppress(RuntimeError):  # MPI, and groups of Python
            number += group._get_sequence_number_for_group()
    return number


def local_rank_of(plan: RunPlan) -> int:
    """This rank's number on its host."""
    return plan.joined.local_rank if plan.joined else int(os.environ.get("LOCAL_RANK", "0"))
