"""Where ranks run, how many there are, and over what they communicate."""

from __future__ import annotations

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.placement import LauncherEnvironment, RankPlacement
from distributed.interfaces.plan import Resources
from distributed.planner.hosts import place_of


def place_ranks(
    config: DistributedConfig, spec: BackendSpec, resources: Resources, joined: LauncherEnvironment | None
) -> RankPlacement:
    """Decide where the ranks run, how many there are, and over what they communicate.

    Args:
        joined: this process's position, if a launcher started it.

    Raises:
        UserError: too few GPUs, a transport that the device does not have, or the launcher started
            another number of ranks.
    """
    notes: list[str] = []
    joined = place_of(config, joined)
    device = _choose_device(config, spec, resources, joined, notes)
    num_devices, local_devices = _count_devices(config, spec, resources, device, joined)
    num_replicas = _count_replicas(config, spec, num_devices, joined)
    precision = _choose_precision(config, device, notes)
    return RankPlacement(
        mode=_choose_mode(config, spec, num_devices, joined),
        num_replicas=num_replicas,
        world_size=num_devices // num_replicas,
        local_size=max(1, local_devices // num_replicas),
        node_rank=joined.node_rank if joined else config.node_rank or 0,
        num_nodes=joined.num_nodes if joined else config.num_nodes,
        device=device,
        precision=precision,
        communication_backend=_choose_transport(config, spec, device),
        joined=joined,
        notes=tuple(notes),
    )


def _choose_device(
    config: DistributedConfig,
    spec: BackendSpec,
    resources: Resources,
    joined: LauncherEnvironment | None,
    notes: list[str],
) -> str:
    here = joined.local_size if joined else (config.num_ranks or 1) // config.num_nodes
    if spec.remote and joined is None:
        here = config.num_ranks or 1
    if config.device == "cpu":
        return "cpu"
    if config.device == "auto" and resources.num_gpus == 0:
        if config.num_gpus or config.gpus_per_node:
            notes.append("no GPU found: the ranks run as CPU processes over gloo")
        return "cpu"
    where, per = ("on this host", "per host") if joined or not spec.remote else ("there",) * 2
    # Slurm and others may show every task a single device of its own.
    one_visible_each = joined is not None and resources.num_gpus == 1
    if resources.num_gpus < here and not one_visible_each:
        if _may_share(config, spec, resources):
            transport = _choose_transport(config, spec, "cuda")
            notes.append(f"{here} ranks share {resources.num_gpus} GPU(s) over {transport}")
            return "cuda"
        raise UserError(
            f"{here} ranks {where} need {here} GPUs and {resources.num_gpus} are visible",
            field="num_gpus",
            got=config.num_ranks,
            allowed=f"at most {resources.num_gpus} {per}",
            remedy="Use fewer ranks, or set device=cpu to run them as CPU processes;"
            " CUDA_VISIBLE_DEVICES may hide some; device=cuda with communication_backend=gloo lets ranks"
            " share a GPU",
        )
    return "cuda"


def _may_share(config: DistributedConfig, spec: BackendSpec, resources: Resources) -> bool:
    """Whether several ranks may compute on one GPU: NCCL refuses that, gloo and threads do not. It has to be
    asked for, so that a mistaken number of ranks stays an error."""
    asked = config.device == "cuda" and config.communication_backend == "gloo"
    return (asked or spec.shares_devices) and resources.num_gpus > 0 and not spec.remote


def _count_devices(
    config: DistributedConfig,
    spec: BackendSpec,
    resources: Resources,
    device: str,
    joined: LauncherEnvironment | None,
) -> tuple[int, int]:
    if joined is not None:
        return joined.size, joined.local_size
    if config.num_ranks is not None:
        return config.num_ranks, config.num_ranks // config.num_nodes
    several = device == "cuda" and spec.capabilities.multi_process
    here = resources.num_gpus // (config.num_nodes if spec.remote else 1) if several else 1
    return here * config.num_nodes, here


def _count_replicas(
    config: DistributedConfig, spec: BackendSpec, num_devices: int, joined: LauncherEnvironment | None
) -> int:
    if spec.num_replicas is None or joined is not None:
        return 1
    number = spec.num_replicas(config, num_devices)
    if number < 1 or num_devices % number:
        raise ValueError(f"backend '{spec.name}' gives a rank {number} of {num_devices} devices")
    return number


def _choose_precision(config: DistributedConfig, device: str, notes: list[str]) -> str:
    asked = config.mixed_precision
    if asked is False:
        return "fp32"
    if asked is True:
        if device == "cpu":
            notes.append("mixed_precision=True means bf16 on CPU; set 'fp16' for fp16 with a scaler")
            return "bf16"
        return "fp16"
    return asked


def _choose_transport(config: DistributedConfig, spec: BackendSpec, device: str) -> str:
    asked = config.communication_backend
    if asked == "nccl" and device == "cpu":
        raise UserError(
            "nccl moves data between GPUs and the ranks run on CPU",
            field="communication_backend",
            got="nccl",
            allowed="auto, gloo, mpi",
        )
    if asked == "auto":
        return spec.transports[0 if device == "cpu" else 1]
    return asked


def _choose_mode(
    config: DistributedConfig, spec: BackendSpec, num_devices: int, joined: LauncherEnvironment | None
) -> str:
    if joined is not None:
        return "join"
    if spec.remote:
        return "spawn"
    # Several devices in one process have to be set up before the framework has started there.
    alone = num_devices == 1 and config.num_nodes == 1 and config.launch != "spawn" and not config.is_elastic
    return "in-process" if alone or not spec.capabilities.multi_process else "spawn"
