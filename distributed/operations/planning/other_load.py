"""Processor time that other processes take while something is measured."""

from __future__ import annotations

import resource
from typing import NamedTuple

import psutil

__all__ = ["BUSY", "ProcessorTime"]

BUSY = 0.1
"""Share of the processors in use by others from which on measured times are doubtful."""

_NOT_COUNTED = ("guest", "guest_nice")
"""Times of the kernel that are part of others."""


class ProcessorTime(NamedTuple):
    """Seconds of all processors since some moment.

    Attributes:
        total: those that have passed.
        idle: those in which nothing ran.
        own: those that this process and all processes below it have used: children, and ranks that a child
            has started.
    """

    total: float
    idle: float
    own: float

    @classmethod
    def now(cls) -> ProcessorTime:
        """The counters of the kernel."""
        times = psutil.cpu_times()._asdict()
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        living = sum(map(_used, psutil.Process().children(recursive=True)))
        return cls(
            total=sum(seconds for name, seconds in times.items() if name not in _NOT_COUNTED),
            idle=times["idle"] + times.get("iowait", 0.0),
            own=living + sum(usage.ru_utime + usage.ru_stime for usage in own),
        )

    def others_until(self, later: ProcessorTime) -> float:
        """Share of the processors that others have used from here to `later`, another machine on the same
        host among them."""
        total = later.total - self.total
        if total <= 0.0:
            return 0.0
        busy = total - (later.idle - self.idle)
        return max(0.0, busy - (later.own - self.own)) / total


def _used(process: psutil.Process) -> float:
    """Seconds that `process` and those of its children that have ended have used."""
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended meanwhile
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
