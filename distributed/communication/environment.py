"""Detect the launcher (torchrun, mpirun, srun, horovodrun, Ray Train) and this process's rank."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from distributed.errors import UserError
from distributed.interfaces.placement import LauncherEnvironment
from distributed.system.addresses import free_port


def detect(env: Mapping[str, str]) -> LauncherEnvironment | None:
    """The rank that a launcher gave this process; None without a launcher.

    A worker of Ray Train comes first, because Ray's TorchTrainer sets torchrun's variables as well. Then
    torchrun's variables, which deepspeed sets too, horovodrun's, mpirun's and srun's. srun counts only in
    a step of more than one task, because a batch script also has SLURM variables.

    Raises:
        UserError: a launcher's variables contradict each other or leave out what is needed.
    """
    worker = None if "DISTRIBUTED_RUN_DIR" in env else _ray_worker()
    if worker is not None:
        return _ray_train(worker)
    if "RANK" in env and "WORLD_SIZE" in env:
        _check_unmixed(env)
        return _torchrun(env)
    if "HOROVOD_RANK" in env and "HOROVOD_SIZE" in env:
        return _horovodrun(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _mpirun(env)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", 0)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and tasks > 1:
        return _srun(env, tasks)
    return None


def _ray_worker() -> Any:
    """Ray Train's context in one of its workers; None elsewhere, and if it was not imported."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        context.get_world_rank()
    except (AttributeError, RuntimeError, DeprecationWarning):  # the last in a trial of Ray Tune
        return None
    return context


def _ray_train(worker: Any) -> LauncherEnvironment:
    size, local_size = worker.get_world_size(), worker.get_local_world_size()
    return LauncherEnvironment(
        "ray",
        worker.get_world_rank(),
        size,
        worker.get_local_rank(),
        local_size,
        worker.get_node_rank(),
        max(1, size // local_size),
        *_ray_rendezvous(size, local_size),
    )


@cache
def _ray_rendezvous(size: int, local_size: int) -> tuple[str, int]:
    """Host and port chosen by rank 0, for the lifetime of this worker. Collective."""
    if size == 1:
        return "127.0.0.1", 0
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    host = "127.0.0.1" if local_size == size else ray.util.get_node_ip_address()
    place: tuple[str, int] = broadcast_from_rank_zero((host, free_port()))
    return place


def _torchrun(env: Mapping[str, str]) -> LauncherEnvironment:
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise UserError(
            "RANK and WORLD_SIZE are set, but not the address of the rendezvous",
            field="MASTER_ADDR, MASTER_PORT",
            remedy="Start with torchrun, which sets them, or unset RANK and WORLD_SIZE",
        )
    # deepspeed's launcher has other names for the rest.
    deepspeed = "CROSS_SIZE" in env and "LOCAL_WORLD_SIZE" not in env
    local, node = ("LOCAL_SIZE", "CROSS_RANK") if deepspeed else ("LOCAL_WORLD_SIZE", "GROUP_RANK")
    local_rank, local_size = _number(env, "LOCAL_RANK", rank), _number(env, local, size)
    _below(rank, "RANK", size, "WORLD_SIZE")
    _below(local_rank, "LOCAL_RANK", local_size, local)
    if size > 1 and env["MASTER_PORT"] == "0":
        raise UserError(
            "MASTER_PORT is 0: the launcher picked a port but did not publish it",
            field="MASTER_PORT",
            got=0,
            remedy="Give torchrun a port, or --standalone, or leave --master-port out",
        )
    return LauncherEnvironment(
        "spawn" if "DISTRIBUTED_RUN_DIR" in env else "deepspeed" if deepspeed else "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        _number(env, node, rank // local_size),
        max(1, size // local_size),
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT", 0),
    )


def torchrun_variables(place: LauncherEnvironment) -> dict[str, str]:
    """torchrun's variables for the rank `place`, whose store is served by its launcher."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _check_unmixed(env: Mapping[str, str]) -> None:
    """Refuse contradicting variables of two launchers: ranks would wait for others that do not exist."""
    if "DISTRIBUTED_RUN_DIR" in env:
        return  # Started by this package's own launcher.
    for ours, theirs in (("WORLD_SIZE", "HOROVOD_SIZE"), ("RANK", "HOROVOD_RANK")):
        if env.get(theirs, env[ours]) != env[ours]:
            raise UserError(
                f"torchrun's variables and horovodrun's are both set and differ: {ours}={env[ours]},"
                f" {theirs}={env[theirs]}",
                field=ours,
                got=env[ours],
                allowed=f"{env[theirs]}, or no {theirs} at all",
                remedy="Start with one of them; unset the other's variables (RANK, WORLD_SIZE, MASTER_*,"
                " or HOROVOD_*)",
            )


def _horovodrun(env: Mapping[str, str]) -> LauncherEnvironment:
    rank, size = _number(env, "HOROVOD_RANK"), _number(env, "HOROVOD_SIZE")
    local_size = _number(env, "HOROVOD_LOCAL_SIZE", size)
    nodes = max(1, -(-size // local_size))
    # horovodrun's own host is not always that of rank 0, but no variable names the latter.
    address = "127.0.0.1" if nodes == 1 else env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    return LauncherEnvironment(
        "horovodrun",
        rank,
        size,
        _number(env, "HOROVOD_LOCAL_RANK", rank),
        local_size,
        _number(env, "HOROVOD_CROSS_RANK", rank // local_size),
        nodes,
        env.get("MASTER_ADDR", address),
        _number(env, "MASTER_PORT", _job_port(env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0"))),
    )


def _mpirun(env: Mapping[str, str]) -> LauncherEnvironment:
    rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    nodes = max(1, -(-size // local_size))
    if nodes > 1 and "MASTER_ADDR" not in env:
        raise UserError(
            "ranks on several hosts need the address of the rendezvous",
            field="MASTER_ADDR",
            remedy="mpirun -x MASTER_ADDR=<first host> -x MASTER_PORT=29500 ...",
        )
    job = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", "0"))
    return LauncherEnvironment(
        "mpirun",
        rank,
        size,
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank),
        local_size,
        rank // local_size,
        nodes,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT", _job_port(job)),
    )


def _srun(env: Mapping[str, str], size: int) -> LauncherEnvironment:
    rank = _number(env, "SLURM_PROCID")
    hosts = expand_nodelist(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "127.0.0.1")))
    nodes = _number(env, "SLURM_STEP_NUM_NODES", len(hosts))
    job = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}"
    address = hosts[0] if nodes > 1 else "127.0.0.1"
    return LauncherEnvironment(
        "srun",
        rank,
        size,
        _number(env, "SLURM_LOCALID", rank),
        max(1, size // nodes),
        _number(env, "SLURM_NODEID", 0),
        nodes,
        env.get("MASTER_ADDR", address),
        _number(env, "MASTER_PORT", _job_port(job)),
    )


def expand_nodelist(text: str) -> list[str]:
    """Slurm's compact host list: ``n[1-3,07],login`` -> n1 n2 n3 n07 login."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*", text):
        if part:
            hosts += _expand(part)
    return hosts


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    hosts = []
    for item in match.group(1).split(","):
        low, _, high = item.partition("-")
        for number in range(int(low), int(high or low) + 1):
            hosts += _expand(f"{part[: match.start()]}{number:0{len(low)}d}{part[match.end() :]}")
    return hosts


def _job_port(job: str) -> int:
    """A port below the ephemeral range, the same on all ranks of a job."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    try:
        return int(env[name])
    except (KeyError, ValueError):
        raise UserError(
            "the launcher's variable is not a whole number", field=name, got=env.get(name)
        ) from None


def _below(value: int, name: str, limit: int, limit_name: str) -> None:
    if not 0 <= value < limit:
        raise UserError(
            "the launcher's variables contradict each other",
            field=name,
            got=value,
            allowed=f"0 to {limit_name} - 1 = {limit - 1}",
        )
