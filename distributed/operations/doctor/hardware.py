"""Facts about this host that decide how ranks communicate, read from files of the kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

__all__ = ["HostHardware", "Interface", "RdmaPort", "nccl_version", "read_hardware", "read_topology"]

_TYPES = {"772": "loopback", "32": "infiniband", "1": "ethernet"}
"""Numbers of ``/sys/class/net/<name>/type`` (``linux/if_arp.h``)."""
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        kind: ``ethernet`` and ``infiniband`` belong to a device; ``virtual`` are bridges and tunnels.
        up: whether its state is not ``down``.
        speed: Mbit/s; 0 if the kernel does not know it, as in most virtual machines.
    """

    name: str
    kind: Literal["ethernet", "infiniband", "loopback", "virtual"]
    up: bool = True
    speed: int = 0


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device.

    Attributes:
        link: ``InfiniBand``; ``RoCE``, which is RDMA over Ethernet; or ``EFA`` of AWS.
        active: whether its state is ACTIVE.
        roce_v2_gid: index of the first RoCE v2 GID with an IPv4 address; None without one.
    """

    device: str
    port: int
    link: Literal["InfiniBand", "RoCE", "EFA"]
    active: bool = True
    roce_v2_gid: int | None = None


@dataclass(frozen=True)
class HostHardware:
    """What decides how the ranks of a host communicate.

    Attributes:
        gpus: models of the GPUs.
        nvlink: whether GPUs are connected by NVLink; None if that is not known.
        interfaces: network interfaces by name.
        route: interface of the default route; empty without one.
        verbs: whether user space can open an RDMA device (``/dev/infiniband/uverbs*``).
        shared_memory: bytes of ``/dev/shm``.
        container: whether this is a container.
        wsl: whether this is Windows Subsystem for Linux.
        cores: cores that this process may use.
        nccl: major and minor version of the installed NCCL package; None without one.
    """

    gpus: tuple[str, ...] = ()
    nvlink: bool | None = None
    interfaces: tuple[Interface, ...] = ()
    route: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    verbs: bool = False
    shared_memory: int = 0
    container: bool = False
    wsl: bool = False
    cores: int = 1
    nccl: tuple[int, int] | None = None

    def active_ports(self, *links: str) -> list[RdmaPort]:
        """Active ports of these links that user space can open. NCCL needs a RoCE v2 GID with an IPv4
        address on RoCE ports."""
        return [
            port
            for port in self.rdma
            if self.verbs and port.active and port.link in links
            if port.link != "RoCE" or port.roce_v2_gid is not None
        ]

    def interface(self, name: str) -> Interface | None:
        """The interface of that name."""
        return next((one for one in self.interfaces if one.name == name), None)


def read_hardware(root: Path = Path("/"), topology: Callable[[], str] | None = None) -> HostHardware:
    """Read the facts of this host.

    Args:
        root: folder that holds ``dev``, ``proc`` and ``sys``.
        topology: function that returns the text of ``nvidia-smi topo -m``; `read_topology` by default.
    """
    gpus = tuple(_gpu_names(root))
    return HostHardware(
        gpus=gpus,
        nvlink=_has_nvlink(root, topology or read_topology) if len(gpus) > 1 else None,
        interfaces=tuple(_interfaces(root / "sys/class/net")),
        route=_default_route(root / "proc/net/route"),
        rdma=tuple(_rdma_ports(root / "sys/class/infiniband")),
        verbs=any((root / "dev/infiniband").glob("uverbs*")),
        shared_memory=shutil.disk_usage(root / "dev/shm").total if (root / "dev/shm").is_dir() else 0,
        container=any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
        or "kubepods" in _text(root / "proc/1/cgroup"),
        wsl="microsoft" in _text(root / "proc/sys/kernel/osrelease").lower(),
        cores=len(os.sched_getaffinity(0)),
        nccl=nccl_version(),
    )


def read_topology() -> str:
    """The text of ``nvidia-smi topo -m``; empty if it fails."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def nccl_version() -> tuple[int, int] | None:
    """Major and minor version of the NCCL package that torch uses; None without one."""
    for name in _NCCL_PACKAGES:
        try:
            major, minor = version(name).split(".")[:2]
            return int(major), int(minor)
        except (PackageNotFoundError, ValueError):
            continue
    return None


def _gpu_names(root: Path) -> Iterator[str]:
    for path in _sorted(root / "proc/driver/nvidia/gpus"):
        found = re.search(r"^Model:\s*(.+)$", _text(path / "information"), re.MULTILINE)
        yield found[1].strip() if found else "unknown model"


def _has_nvlink(root: Path, topology: Callable[[], str]) -> bool | None:
    if any((root / "dev").glob("nvidia-nvswitch*")):
        return True
    rows = [line.split() for line in topology().splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [cell for row in rows for cell in row[1:]]
    return any(re.fullmatch(r"NV\d+", cell) for cell in cells) if rows else None


def _interfaces(folder: Path) -> Iterator[Interface]:
    for path in _sorted(folder):
        kind = _TYPES.get(_text(path / "type"), "virtual")
        if kind == "ethernet" and not (path / "device").exists():
            kind = "virtual"
        speed = _text(path / "speed")
        # -1 where the device is down or does not know.
        number = max(0, int(speed)) if re.fullmatch(r"-?\d+", speed) else 0
        up = _text(path / "operstate") != "down"
        yield Interface(path.name, kind, up, number)  # type: ignore[arg-type]


def _default_route(path: Path) -> str:
    rows = [line.split() for line in _text(path).splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(routes)[1] if routes else ""


def _rdma_ports(folder: Path) -> Iterator[RdmaPort]:
    for device in _sorted(folder):
        efa = (device / "device/driver").resolve().name == "efa"
        for port in _sorted(device / "ports"):
            ethernet = _text(port / "link_layer") == "Ethernet"
            yield RdmaPort(
                device.name,
                int(port.name),
                "EFA" if efa else "RoCE" if ethernet else "InfiniBand",
                "ACTIVE" in _text(port / "state"),
                _roce_v2_gid(port) if ethernet and not efa else None,
            )


def _roce_v2_gid(port: Path) -> int | None:
    types = _sorted(port / "gid_attrs/types")
    for path in sorted(types, key=lambda path: int(path.name)):
        # An IPv4 address as a GID: ::ffff:a.b.c.d.
        mapped = _text(port / "gids" / path.name).startswith("0000:0000:0000:0000:0000:ffff:")
        if mapped and _text(path) == "RoCE v2":
            return int(path.name)
    return None


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """The content of a file without blanks at its ends; empty if it cannot be read, as ``speed`` of an
    interface that is down or ``gid_attrs`` of an unused index."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
