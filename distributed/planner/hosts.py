"""The position of this process among the hosts of a run, and where they meet."""

from __future__ import annotations

from distributed.config import DistributedConfig
from distributed.config.load import override
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.placement import LauncherEnvironment, RankPlacement


def as_host(
    config: DistributedConfig, joined: LauncherEnvironment | None
) -> tuple[DistributedConfig, LauncherEnvironment | None]:
    """Let a Slurm task start the ranks of its host: srun with one task per host, and more ranks than hosts
    in the configuration. Slurm's variables supply node rank and rendezvous."""
    wanted = config.num_ranks
    if joined is None or joined.launcher != "srun" or joined.local_size != 1 or config.launch == "join":
        return config, joined
    if wanted in (None, joined.size) or config.num_nodes != joined.num_nodes:
        return config, joined
    place = {"rdzv_endpoint": f"{joined.master_addr}:{joined.master_port}"}
    given = {"node_rank": joined.node_rank, **(place if config.rdzv_endpoint is None else {})}
    return override(config, given, "srun: first host of the step, port from the job's number"), None


def place_of(config: DistributedConfig, joined: LauncherEnvironment | None) -> LauncherEnvironment | None:
    """The rank that this process becomes, None when it starts ranks.

    Raises:
        UserError: there is no launcher to join, or the launcher started another number of ranks.
    """
    if config.launch in ("spawn", "per-rank"):
        return None
    if config.launch == "join" and joined is None:
        raise UserError(
            "there is no launcher to join",
            field="launch",
            got="join",
            remedy="Start with torchrun, srun or mpirun, or use launch=auto",
        )
    if joined is not None:
        asked = config.num_ranks
        if asked is not None and asked != joined.size:
            raise UserError(
                f"the config asks for {asked} ranks and {joined.launcher} started {joined.size}",
                field="num_gpus",
                got=asked,
                allowed=str(joined.size),
                remedy=f"Leave num_gpus out under {joined.launcher}, or start {asked} processes",
            )
    return joined


def check_nodes(config: DistributedConfig, spec: BackendSpec, placement: RankPlacement) -> None:
    """Check that hosts that start ranks can find each other.

    Raises:
        UserError: names the missing fields.
    """
    if placement.mode != "spawn" or placement.num_nodes == 1 or spec.remote:
        return
    # An elastic run has no fixed number of hosts, and numbers them itself.
    needed = ("rdzv_endpoint",) if config.is_elastic else ("node_rank", "rdzv_endpoint")
    missing = [name for name in needed if getattr(config, name) is None]
    if missing:
        raise UserError(
            f"{placement.num_nodes} nodes need to know each other: {' and '.join(missing)} missing",
            field=missing[0],
            remedy="Run the same command on every node with --node-rank 0, 1, ... and"
            " --rdzv-endpoint HOST:PORT of node 0, or start with torchrun or srun",
        )


def meeting_notes(config: DistributedConfig, spec: BackendSpec, placement: RankPlacement) -> list[str]:
    """Where the ranks of several hosts meet, and which source named the address."""
    if placement.num_nodes == 1 or spec.remote:
        return []
    joined = placement.joined
    if joined is not None:
        return [f"ranks meet at {joined.master_addr}:{joined.master_port}, as {joined.launcher} says"]
    serves = "the first process there" if config.is_elastic else "node 0"
    return [f"hosts meet at {config.rdzv_endpoint} ({config.origin('rdzv_endpoint')}); {serves} serves it"]
