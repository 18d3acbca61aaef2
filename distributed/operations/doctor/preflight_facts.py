"""Facts about one host, and its links to the others."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = (
    "distributed-trainer",
    "torch",
    "numpy",
    "deepspeed",
    "horovod",
    "ray",
    "tensorflow",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_GIB = 2**30


@dataclass
class Link:
    """Link from one host to another.

    Attributes:
        error: why the other host cannot be reached; empty when it can.
        round_trip: seconds of the fastest of several one-byte round trips.
        bandwidth: bytes a second of one stream.
    """

    error: str = ""
    round_trip: float = 0.0
    bandwidth: float = 0.0


@dataclass
class Facts:
    """One host.

    Attributes:
        address: address from which it reaches the rendezvous.
        name_resolves_to: the address that it finds under its own name; empty when it finds none.
        versions: versions of Python and of the installed packages that matter for training.
        gpus: names of its CUDA devices.
        cpus: cores that this process may use.
        memory: bytes of main memory.
        shared_memory: bytes free in /dev/shm.
        clock: seconds that its clock is ahead of node 0's.
        clock_error: uncertainty of `clock` in seconds.
        links: other node -> link to it.
        checkpoint: problem with ``checkpoint_dir`` there; empty without a problem, None without one.
    """

    node: int
    host: str
    address: str = ""
    name_resolves_to: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    cpus: int = 0
    memory: int = 0
    shared_memory: int = 0
    clock: float = 0.0
    clock_error: float = 0.0
    links: dict[int, Link] = field(default_factory=dict)
    checkpoint: str | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Facts:
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON."""
        links = {int(node): Link(**link) for node, link in data["links"].items()}
        return cls(**{**data, "links": links})


def own_facts(node: int, address: str, with_gpus: bool = True) -> Facts:
    """Collect the facts about this host."""
    import psutil

    return Facts(
        node=node,
        host=socket.gethostname(),
        address=address,
        name_resolves_to=_resolved(),
        versions={"python": platform.python_version(), **installed_versions(_PACKAGES)},
        gpus=_gpus() if with_gpus else [],
        cpus=len(os.sched_getaffinity(0)),
        memory=int(psutil.virtual_memory().total),
        shared_memory=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
    )


def _resolved() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of the distributions `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
