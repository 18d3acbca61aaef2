"""How much memory the processes of this host may use together."""

from __future__ import annotations

from pathlib import Path

__all__ = ["memory_limit"]


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of this host's memory, or the limit of this process's control group if it is lower.

    Args:
        root: of the file system.
    """
    limits = [_total(root)]
    for line in _read(root / "proc/self/cgroup").splitlines():
        path = line.split(":", 2)[-1].strip("/")
        for parent in [Path(path), *Path(path).parents]:
            limits += _limit(root / "sys/fs/cgroup" / parent / "memory.max")
            limits += _limit(root / "sys/fs/cgroup/memory" / parent / "memory.limit_in_bytes")
    return min(limits)


def _total(root: Path) -> int:
    line = next(line for line in _read(root / "proc/meminfo").splitlines() if line.startswith("MemTotal:"))
    return int(line.split()[1]) * 1024


def _limit(path: Path) -> list[int]:
    text = _read(path).strip()
    return [int(text)] if text.isdigit() else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
