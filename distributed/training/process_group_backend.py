"""Ranks that meet in a torch process group: the base of DDP, FSDP2 and their like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.communication.process_group import GroupMixin, local_rank_of
from distributed.errors import UserError
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.training.torch_backend import TorchBackend

__all__ = ["ProcessGroupBackend", "claim_device"]

_Result = TypeVar("_Result")


class ProcessGroupBackend(GroupMixin, TorchBackend):
    """A torch backend whose ranks meet in the default process group, or use the one that is there.

    Attributes:
        store: where they met, None with a group that was there or without one.
        counting_ends: with `add_count`: the next count is a window's last.
        replica_group: process group of the ranks with different samples; None for all.
        count_group: process group over which counts are added; None for all.
    """

    counting_ends = True
    replica_group: Any = None
    count_group: Any = None
    _seen: Any = None
    _reduction: tuple[Any, Tensor] | None = None

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        device = claim_device(plan, local_rank_of(plan))
        self.world = self.meet(plan, _group_kind(plan), device)
        return self.world

    def start_outside_fit(self, plan: RunPlan) -> World:
        if plan.world_size == 1 and not dist.is_initialized():
            self._owns_group = True
            self._open_group(plan, _group_kind(plan))
        return self.setup(plan)

    def add_count(self, count: Any) -> None:
        """Add one micro-batch's count of tokens (C2). The ranks add theirs in a small collective of
        its own, under way while a window's last backward runs: for backends with gradients that
        cannot carry it (`counts_with_gradients` false)."""
        self._seen = count if self._seen is None else self._seen + count
        if self.counting_ends:
            tensor = torch.as_tensor(self._seen).detach().to(self.world.device, torch.float64, copy=True)
            work = dist.all_reduce(tensor, group=self.count_group, async_op=True)
            self._reduction, self._seen = (work, tensor), None

    def on_first_rank(self, function: Callable[[], _Result]) -> _Result:
        """What `function` returns on rank 0, on all ranks; its error is raised on all. Collective."""
        found: Any = None
        if self.world.rank == 0:
            try:
                found = function()
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks
                found = error
        found = self.broadcast_object(found)
        if isinstance(found, BaseException):
            raise found
        result: _Result = found
        return result

    def teardown(self) -> None:
        self.undo_levers()
        super().teardown()

    def _total_count(self) -> Any:
        if self._reduction is not None:
            (work, self._count), self._reduction = self._reduction, None
            work.wait()
        return super()._total_count()


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
    # A launcher may show every rank one device of its own, which is then number 0; and over gloo ranks may
    # share devices (see `plan`).
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"
