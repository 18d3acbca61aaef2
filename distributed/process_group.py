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

from distributed.errors import UserError
from distributed.interfaces.backend import World
from distributed.torch_backend import TorchBackend

if TYPE_CHECKING:
    from distributed.joined import Joined
    from distributed.plan import RunPlan

__all__ = ["ProcessGroupBackend"]

_REMIND = 10.0


class ProcessGroupBackend(TorchBackend):
    """Meets the other ranks in the default process group, or uses the one that is there.

    Collectives on plain numbers and objects go over gloo, also beside nccl, so that logging
    never waits for the GPU's stream.
    """

    _owns_group = False

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        place = plan.joined
        local_rank = place.local_rank if place else int(os.environ.get("LOCAL_RANK", "0"))
        device = _claim_device(plan, local_rank)
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
            node_rank=rank // local_size,
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
        store = _store(plan.joined, rank, size, timeout)
        await_ranks(store, rank, size, plan.config.collective_timeout)
        dist.init_process_group(
            kind, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
        )

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


def _claim_device(plan: RunPlan, local_rank: int) -> str:
    if plan.device == "cpu":
        return "cpu"
    # A launcher may show every rank one device of its own, which is then number 0.
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _store(joined: Joined | None, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store of whoever started the ranks, or one that rank 0 opens."""
    host = joined.master_addr if joined else os.environ["MASTER_ADDR"]
    port = joined.master_port if joined else int(os.environ["MASTER_PORT"])
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(
            host, port, size, is_master=rank == 0 and not served, wait_for_workers=False, timeout=timeout
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise UserError(
                "the rendezvous port is in use",
                field="MASTER_PORT",
                got=port,
                remedy="Choose another (torchrun --master-port), or end the run that holds it",
            ) from None
        raise UserError(
            f"rank {rank} cannot reach the rendezvous: {error}",
            field="MASTER_ADDR",
            got=f"{host}:{port}",
            remedy="Check that rank 0 runs there and that no firewall closes the port",
        ) from None
    return dist.PrefixStore(f"distributed/{restart}", store)


def await_ranks(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Return when every rank is here; rank 0 says meanwhile who is missing.

    Raises:
        UserError: after `timeout` seconds; names the missing ranks.
    """
    store.set(f"here/{rank}", socket.gethostname())
    started = time.monotonic()
    missing = [r for r in range(size) if r != rank]
    while missing:
        try:
            store.wait([f"here/{missing[0]}"], timedelta(seconds=min(_REMIND, timeout)))
            missing.pop(0)
        except dist.DistStoreError:
            waited = time.monotonic() - started
            absent = [r for r in missing if not store.check([f"here/{r}"])]
            names = ", ".join(map(str, absent))
            if absent and waited >= timeout:
                raise UserError(
                    f"ranks {names} of {size} did not come within {waited:.0f} s",
                    field="collective_timeout",
                    got=timeout,
                    remedy="See their own output for why, or start them",
                ) from None
            if absent and rank == 0:
                print(f"waiting for rank {names} of {size} ({waited:.0f} s)", flush=True)
