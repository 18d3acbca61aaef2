"""Join the ranks of a launcher from a script with a loop of its own."""

from __future__ import annotations

import atexit
import os
from typing import Any

from distributed.communication.environment import detect
from distributed.config.load import Layer, load_layers
from distributed.errors import UserError, hide_own_frames
from distributed.interfaces.backend import Backend
from distributed.interfaces.placement import LauncherEnvironment, World
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.system.addresses import free_port
from distributed.system.devices import visible_gpus

__all__ = ["check_place", "cleanup_distributed", "setup_distributed", "setup_horovod"]

_joined: Backend | None = None
"""What `setup_distributed` has set up, until `cleanup_distributed`."""
_set: list[str] = []
"""Variables that `setup_distributed` has set."""


@hide_own_frames
def setup_distributed(
    rank: int | None = None, world_size: int | None = None, backend: str | None = None, **fields: Any
) -> World:
    """Join torch's default process group, and make this rank's GPU the current one. Collective.

    `Trainer.fit` and `train_step` need no call; they use the group if there is one. On one host, ranks listen
    on the loopback interface only.

    Args:
        rank: this process's number; None takes it from the launcher (torchrun, srun, mpirun, horovodrun).
            Given without a launcher, as in a function of ``torch.multiprocessing.spawn``, the ranks meet at
            MASTER_ADDR and MASTER_PORT (127.0.0.1 and 29500, if not set; one rank takes a free port).
        world_size: number of ranks; None takes it from the launcher.
        backend: ``nccl``, ``gloo`` or ``mpi``; None is nccl on GPUs and gloo on CPUs.
        fields: of `DistributedConfig`, such as ``device="cpu"`` or ``collective_timeout=60``.

    Returns:
        Rank, sizes and device of this process.

    Raises:
        UserError: there is no launcher and no rank, `rank` or `world_size` is not the launcher's, or ranks
            are missing.
    """
    global _joined
    place = _place(rank, world_size)
    if backend is not None:
        fields["communication_backend"] = backend
    try:
        joined, world = _start(place, fields)
    except BaseException:
        _forget_variables()
        raise
    if _joined is None:
        _joined = joined
        atexit.register(cleanup_distributed)
    return world


def cleanup_distributed() -> None:
    """Leave torch's default process group, if there is one."""
    global _joined
    import torch.distributed as dist

    if _joined is not None:
        _joined.teardown()
        _joined = None
        atexit.unregister(cleanup_distributed)
    if dist.is_initialized():
        from distributed.communication.process_group import destroy_group

        destroy_group()
    _forget_variables()


@hide_own_frames
def setup_horovod(**fields: Any) -> World:
    """Start Horovod on the ranks of a launcher, and make this rank's GPU the current one. Collective.

    As ``hvd.init()`` under horovodrun, and under torchrun, srun and mpirun as well. `HorovodTrainer` needs no
    call.

    Args:
        fields: of `DistributedConfig`, such as ``device="cpu"``.

    Returns:
        Rank, sizes and device of this process.

    Raises:
        UserError: there is no launcher, Horovod is not installed, or ranks are missing.
    """
    return _start(_place(None, None), {"backend": "horovod", **fields})[1]


def check_place(found: LauncherEnvironment, rank: int | None, world_size: int | None) -> None:
    """Raise a UserError if `rank` or `world_size` is not that of the launcher."""
    for name, given, own in (("rank", rank, found.rank), ("world_size", world_size, found.size)):
        if given not in (None, own):
            raise UserError(
                f"{found.launcher} gave this process another {name}",
                field=name,
                got=given,
                allowed=str(own),
                remedy="Leave rank and world_size out under a launcher",
            )


def _start(place: LauncherEnvironment, fields: dict[str, Any]) -> tuple[Backend, World]:
    config = load_layers([Layer("argument", {"launch": "join", **fields})])
    catalog = get_catalog()
    gpus = 0 if config.device == "cpu" else visible_gpus()
    plan = resolve(config, catalog, Facts(), Resources(gpus), place)
    joined = catalog.load_backend(plan.spec)
    return joined, joined.start_outside_fit(plan)


def _place(rank: int | None, world_size: int | None) -> LauncherEnvironment:
    """This process among the ranks."""
    found = detect(os.environ)
    if found is None:
        if rank is None or world_size is None:
            raise UserError(
                "no launcher has started this process, so that its rank is not known",
                field="rank, world_size",
                got=f"{rank}, {world_size}",
                remedy="Start the script with torchrun (`torchrun --nproc-per-node 4 train.py`), or pass"
                " both. Trainer.fit needs neither",
            )
        return _as_launched(rank, world_size)
    check_place(found, rank, world_size)
    return found


def _as_launched(rank: int, world_size: int) -> LauncherEnvironment:
    """Set torchrun's variables, by which later calls of this process know its rank."""
    port = free_port() if world_size == 1 else 29500  # one rank has no peers; another run may use 29500
    given = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(port)),
    }
    found = detect({**os.environ, **given})
    assert found is not None
    _set.extend(name for name in given if name not in os.environ)
    os.environ.update(given)
    return found


def _forget_variables() -> None:
    while _set:
        os.environ.pop(_set.pop(), None)
