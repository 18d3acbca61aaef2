"""Iterators of a feed: windows with a look-ahead, and indices that a loader asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from distributed.interfaces.backend import Window

__all__ = ["Ahead", "Batches"]


class Ahead:
    """An iterator with a look-ahead that detects its end.

    Attributes:
        state: what came with the last window that was taken, whatever was read ahead.
    """

    state: Any = None

    def __init__(self, windows: Iterator[tuple[Window, Any]]) -> None:
        self._windows = windows
        self._held: list[tuple[Window, Any]] = []

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        window, self.state = self._held.pop() if self._held else next(self._windows)
        return window

    def ended(self) -> bool:
        if not self._held:
            self._held += islice(self._windows, 1)
        return not self._held


class Batches:
    """The batch sampler of a loader with persistent workers."""

    source: Callable[[], Iterator[list[Any]]] = staticmethod(lambda: iter(()))

    def __iter__(self) -> Iterator[list[Any]]:
        return self.source()
