"""Ranks that meet in a torch process group: the base of DDP, FSDP2 and their like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distributed.errors import UserError
from distributed.interfaces.backend import World
from distributed.mixins.group import GroupMixin, local_rank_of
from distributed.torch_backend import TorchBackend

if TYPE_CHECKING:
    from distributed.plan import RunPlan

__all__ = ["ProcessGroupBackend", "claim_device"]


class ProcessGroupBackend(GroupMixin, TorchBackend):
    """A torch backend whose ranks meet in the default process group, or use the one that is there.

    Attributes:
        store: where they met, None with a group that was there or without one.
    """

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        device = claim_device(plan, local_rank_of(plan))
        self.world = self.meet(plan, _group_kind(plan), device)
        return self.world


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
