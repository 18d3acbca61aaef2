"""The numbers of a rank: among all ranks, on its host, and from its launcher."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LauncherEnvironment", "RankPlacement", "World"]


@dataclass(frozen=True)
class LauncherEnvironment:
    """Rank and rendezvous of this process, from its launcher's environment.

    Attributes:
        launcher: ``torchrun``, ``deepspeed``, ``horovodrun``, ``mpirun``, ``srun``, ``ray``, or ``spawn`` or
            ``threads`` (our own).
        master_addr: host of the rendezvous.
        master_port: port of the rendezvous.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class World:
    """Rank, sizes and device of one process.

    Attributes:
        rank: rank of this process, 0 to ``size - 1``.
        size: number of ranks.
        local_rank: rank within this host.
        local_size: number of ranks on this host.
        node_rank: index of this host.
        num_nodes: number of hosts.
        host: this host's name.
        device: device of this rank, e.g. ``cpu`` or ``cuda:1``.
        data_parallel_rank: index of this rank's slice of each global batch.
        data_parallel_size: number of slices of each global batch. Equal to `size`
            unless ranks share a model between them (pipeline, tensor parallelism); these have
            the same `data_parallel_rank` and are given the same windows.
        num_replicas: devices that this rank drives, each with a copy of the model. Its micro-batches
            hold `batch_size` samples for each of them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    host: str = "localhost"
    device: str = "cpu"
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    num_replicas: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one model, and with it one slice of each global batch."""
        return self.size // self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Where the ranks of a run are and how they are started, as the planner decides it.

    Attributes:
        mode: ``in-process`` (one rank, here), ``spawn`` (start ranks) or ``join`` (be one).
        world_size: ranks (processes) over all nodes.
        local_size: ranks on this node.
        node_rank: index of this node.
        num_nodes: nodes.
        device: ``cpu`` or ``cuda``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        communication_backend: transport of the collectives, as torch names it.
        num_replicas: devices that each rank drives.
        joined: this process's position when it joins.
        notes: what the user should know, one sentence each.
    """

    mode: str
    world_size: int
    local_size: int
    node_rank: int
    num_nodes: int
    device: str
    precision: str
    communication_backend: str
    num_replicas: int = 1
    joined: LauncherEnvironment | None = None
    notes: tuple[str, ...] = ()
