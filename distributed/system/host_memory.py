"""Memory of the host: what there is, and what this process can still allocate."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Room", "host_memory", "total_memory"]

_ROOT = Path("/")


class Room(NamedTuple):
    """Memory that can still be allocated.

    Attributes:
        nbytes: number of bytes.
        limit: what ends it, as text.
    """

    nbytes: int
    limit: str


def host_memory(num_processes: int = 1) -> Room:
    """What this process can still allocate.

    Args:
        num_processes: processes with equal needs that share the limits of the host and of the container.
    """
    own = [Room(left, limit) for left, limit in _limits_of_process()]
    shared = [Room(left // num_processes, limit) for left, limit in _limits_of_host()]
    return min([*own, *shared], key=lambda room: room.nbytes, default=Room(1 << 62, "no limit"))


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of this host, or the limit of a control group of this process if that is lower.

    Args:
        root: of the file system.
    """
    whole = _numbers(root / "proc/meminfo")["MemTotal"]
    limits = (_number(folder / names[0]) for folder, names in _control_groups(root))
    return min([whole, *(limit for limit in limits if limit is not None)])


def _limits_of_process() -> Iterator[tuple[int, str]]:
    used = _numbers(_ROOT / "proc/self/status")
    for number, field, name in (
        (resource.RLIMIT_AS, "VmSize", "the limit of address space (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData", "the limit of data (ulimit -d)"),
    ):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY and field in used:
            yield max(0, limit - used[field]), name


def _limits_of_host() -> Iterator[tuple[int, str]]:
    available = _numbers(_ROOT / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield available, "the free memory of the host"
    for folder, names in _control_groups(_ROOT):
        limit, used = (_number(folder / name) for name in names[:2])
        if limit is not None and used is not None:
            # The kernel drops cached files before it ends a process.
            cached = _table(folder / "memory.stat").get(names[2], 0)
            yield max(0, limit - used + cached), "the memory limit of the container (cgroup)"


def _control_groups(start: Path = _ROOT) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The control groups of this process and those around them, with the names of limit, use and cache."""
    try:
        lines = (start / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            root, names = start / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = start / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        yield from ((each, names) for each in (folder, *folder.parents) if each.is_relative_to(root))


def _numbers(path: Path) -> dict[str, int]:
    """Field -> bytes, of a file of /proc with lines such as ``VmSize: 12 kB``."""
    found = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value.split()[0]) << 10
    except OSError:
        pass
    return found


def _table(path: Path) -> dict[str, int]:
    try:
        rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
        return {name: int(value) for name, value in rows}
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max" is no limit
        return None
