"""Time in which this process was running: it may be suspended together with those that it monitors."""

from __future__ import annotations

from collections import deque
from time import perf_counter

_LATE = 2.0
"""Seconds by which a call may be late on a busy host."""
_KEPT = 1000
"""Number of suspensions to remember."""


class RunningTime:
    """Measures time without the suspensions of this process (SIGSTOP, ``scontrol suspend``, a frozen
    container). No clock of the kernel leaves them out.

    Args:
        period: seconds between two calls of `tick`.
    """

    def __init__(self, period: float) -> None:
        self.period = period
        self._last = perf_counter()
        self._suspended: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def tick(self) -> float:
        """Note that this process is running; call it every `period` seconds.

        Returns:
            The time on this host's monotonic clock, in seconds.
        """
        now = perf_counter()
        if now - self._last > self.period + _LATE:
            self._suspended.append((self._last + self.period, now))
        self._last = now
        return now

    def between(self, start: float, end: float) -> float:
        """Seconds of `start` to `end`, both on the monotonic clock, in which this process was running."""
        pauses = (min(end, until) - max(start, since) for since, until in self._suspended)
        return end - start - sum(pause for pause in pauses if pause > 0)
