"""What a client asks a fork server for."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass, field

__all__ = ["ADDRESS", "ForkRequest", "namespaces"]

ADDRESS = "DISTRIBUTED_FORK_SERVER"
"""Environment variable: path of the socket of the server that starts this process's ranks."""

_LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_STACK")


def namespaces() -> list[str]:
    """Identifiers of this process's network, mount and process namespaces."""
    return [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid")]


def _blocked_signals() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def _resource_limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS}


@dataclass
class ForkRequest:
    """What the new process is. The defaults are what it would inherit from this process.

    Attributes:
        argv: a Python command line without the interpreter: ``["-P", "-c", code, *args]``,
            ``["-m", module, *args]`` or ``[script, *args]``.
        env: the whole environment.
        fds: numbers that the descriptors sent along get in the new process, in their order.
        preload: modules, or functions ``module:function`` to call, needed before the fork.
        new_session: whether the process leads a session of its own.
        tied: whether the process is killed when the client goes away.
        cwd: working directory.
        blocked: numbers of the signals that are blocked at the start.
        cpus: numbers of the processors that it may use.
        limits: name of a resource limit -> (soft, hard).
        namespaces: of the client; a server in others refuses.
    """

    argv: list[str]
    env: dict[str, str]
    fds: list[int]
    preload: list[str] = field(default_factory=list)
    new_session: bool = False
    tied: bool = False
    cwd: str = field(default_factory=os.getcwd)
    blocked: list[int] = field(default_factory=_blocked_signals)
    cpus: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    limits: dict[str, tuple[int, int]] = field(default_factory=_resource_limits)
    namespaces: list[str] = field(default_factory=namespaces)
