"""FlightClock: how long reductions of gradients are under way, also while this rank computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

__all__ = ["FlightClock"]


class FlightClock:
    """Seconds in which at least one reduction is under way.

    It starts no thread and waits for nothing: the code that launches reductions calls `look` from time to
    time, such as in each hook of backward. A completion is noticed by the next call.
    """

    def __init__(self) -> None:
        self._flying: deque[Callable[[], bool]] = deque()
        self._since = self._seconds = 0.0

    def launch(self, is_completed: Callable[[], bool]) -> None:
        """A reduction has started.

        Args:
            is_completed: whether it has ended; called until it has.
        """
        self.look()
        if not self._flying:
            self._since = perf_counter()
        self._flying.append(is_completed)

    def look(self) -> None:
        """Notice what has ended."""
        if self._flying:
            while self._flying and self._flying[0]():
                self._flying.popleft()
            if not self._flying:
                self._seconds += perf_counter() - self._since

    def end(self) -> None:
        """All have ended: the caller has waited for them."""
        if self._flying:
            self._flying.clear()
            self._seconds += perf_counter() - self._since

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
