"""Which processes a test has started."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

__all__ = ["children", "started_since"]


def children() -> set[psutil.Process]:
    """All processes below this one, those that a fork server started among them, but not the server."""
    return {process for process in psutil.Process().children(recursive=True) if not _serves(process)}


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Processes below this one that are not in `before`, and that none in `before` has started: a browser
    of other tests starts some whenever it likes."""
    found = set()
    for process in children() - before:
        with suppress(psutil.NoSuchProcess):
            if before.isdisjoint(process.parents()):
                found.add(process)
    return found


def _serves(process: psutil.Process) -> bool:
    """Whether it is a fork server or a branch of one: both are in the session of a child of this process,
    while what they start leads a session of its own."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        leader = psutil.Process(os.getsid(process.pid))
        return leader.ppid() == os.getpid() and "distributed.launch.fork_server" in " ".join(leader.cmdline())
    return False
