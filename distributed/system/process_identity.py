"""Which process something belongs to, so that another process can determine whether it has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ProcessIdentity"]


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of some host.

    Attributes:
        host: name of its host.
        boot: the kernel's id of this boot; empty when there is none.
        namespace: its pid namespace. Containers of one host have the same boot and other pids.
        pid: process id in that namespace.
        started: when it started, in clock ticks since the boot; empty when that cannot be read.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), *_kernel(), pid, _state_and_start(pid)[1])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessIdentity:
        """The process that `as_dict` described.

        Raises:
            KeyError, TypeError, ValueError: it describes none.
        """
        host, boot, namespace = (str(values[name]) for name in ("host", "boot", "namespace"))
        return cls(host, boot, namespace, int(values["pid"]), str(values["started"]))

    def as_dict(self) -> dict[str, Any]:
        """The attributes as plain data."""
        return asdict(self)

    def has_ended(self) -> bool | None:
        """Whether the process has ended; None when this process cannot see it: on another host, before a
        reboot, or in another container."""
        if not all(_kernel()) or (self.boot, self.namespace) != _kernel():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's
        state, started = _state_and_start(self.pid)
        # /proc may be mounted such that it hides other users' processes.
        return bool(state) and (state in "ZX" or started != self.started)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@cache
def _kernel() -> tuple[str, str]:
    """Boot id and pid namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """The kernel's letter of a process's state, and its start; empty without such a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    found = fields.rpartition(")")[2].split()
    return found[0], found[19]
