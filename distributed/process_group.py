"""Ranks that meet in a torch process group: the base of DDP, FSDP2 and their like."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.errors import UserError
from distributed.interfaces.backend import World
from distributed.rendezvous import await_ranks, is_loopback, loopback_interface, meeting_place, open_store
from distributed.torch_backend import TorchBackend

if TYPE_CHECKING:
    from distributed.plan import RunPlan

__all__ = ["ProcessGroupBackend", "claim_device"]

_SETTLE = 0.1
"""Seconds."""


class ProcessGroupBackend(TorchBackend):
    """Meets the other ranks in the default process group, or uses the one that is there.

    Attributes:
        store: where they met, None with a group that was there or without one.
        counting_ends: with `add_count`: the next count is a window's last.

    Collectives on plain numbers and objects go over gloo, also beside nccl, so that logging
    never waits for the GPU's stream.
    """

    store: dist.Store | None = None
    counting_ends = True
    _owns_group = False
    _seen: Any = None
    _reduction: tuple[Any, Tensor] | None = None

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        place = plan.joined
        local_rank = place.local_rank if place else int(os.environ.get("LOCAL_RANK", "0"))
        device = claim_device(plan, local_rank)
        if plan.world_size > 1 and not dist.is_initialized():
            self._owns_group = True
            self._meet(plan)
        # A rank alone needs no group, and leaves the caller's process without one.
        rank, size = (dist.get_rank(), dist.get_world_size()) if plan.world_size > 1 else (0, 1)
        local_size = plan.local_size
        self.world = World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=plan.node_rank,
            num_nodes=plan.num_nodes,
            host=socket.gethostname(),
            device=device,
            data_parallel_rank=rank,
            data_parallel_size=size,
        )
        return self.world

    def _meet(self, plan: RunPlan) -> None:
        timeout = timedelta(seconds=plan.config.collective_timeout)
        kind = _group_kind(plan)
        rank, size = (
            (plan.joined.rank, plan.joined.size)
            if plan.joined
            else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        )
        if plan.num_nodes == 1 and is_loopback(meeting_place(plan.joined)[0]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        self.store = open_store(plan.joined, rank, size, timeout)
        await_ranks(self.store, rank, size, plan.config.collective_timeout)
        dist.init_process_group(
            kind, store=dist.PrefixStore("group", self.store), rank=rank, world_size=size, timeout=timeout
        )

    def add_count(self, count: Any) -> None:
        """Add one micro-batch's count of tokens (C2). The ranks add theirs in a small collective of
        its own, under way while a window's last backward runs: for backends with gradients that
        cannot carry it (`counts_with_gradients` false)."""
        self._seen = count if self._seen is None else self._seen + count
        if self.counting_ends:
            tensor = torch.as_tensor(self._seen).detach().to(self.world.device, torch.float64, copy=True)
            self._reduction, self._seen = (dist.all_reduce(tensor, async_op=True), tensor), None

    def _count_ratio(self) -> Tensor | None:
        if self._counts and self._reduction is not None:
            work, count = self._reduction
            work.wait()
            # Gradients were averaged over the ranks: their count is too.
            self._counts, self._reduction = [count / self.world.data_parallel_size], None
        return super()._count_ratio()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        if self.world.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        if self.world.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=root, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        if self.world.size == 1:
            return [value]
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        if self.world.size > 1:
            self.all_reduce([0.0])

    def teardown(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
            if self.world.size > 1:
                # gloo's threads drop their last work under the interpreter's lock; one that asks for
                # it while the interpreter shuts down aborts the process.
                time.sleep(_SETTLE)


def _group_kind(plan: RunPlan) -> str:
    kind = plan.communication_backend
    if kind == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "this torch was built without MPI",
            field="communication_backend",
            got="mpi",
            allowed="auto, gloo, nccl",
            remedy="mpirun can start the ranks all the same",
        )
    return "cpu:gloo,cuda:nccl" if kind == "nccl" else kind


def claim_device(plan: RunPlan, local_rank: int) -> str:
    """The device of this rank, made torch's current one."""
    if plan.device == "cpu":
        return "cpu"
    # A launcher may show every rank one device of its own, which is then number 0.
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    torch.cuda.set_device(index)
    return f"cuda:{index}"
