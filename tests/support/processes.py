"""Which processes a test has started."""

from __future__ import annotations

from contextlib import suppress

import psutil

__all__ = ["children", "started_since"]


def children() -> set[psutil.Process]:
    """All processes below this one."""
    return set(psutil.Process().children(recursive=True))


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Processes below this one that are not in `before`, and that none in `before` has started: a browser
    of other tests starts some whenever it likes."""
    found = set()
    for process in children() - before:
        with suppress(psutil.NoSuchProcess):
            if before.isdisjoint(process.parents()):
                found.add(process)
    return found
