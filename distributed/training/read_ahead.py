"""ReadAhead: the windows of a feed, of which the next is read and copied while the device still computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distributed.interfaces.backend import Backend, Window

__all__ = ["ReadAhead"]


class ReadAhead:
    """Windows in their order; `load` reads the next one before it is asked for.

    Args:
        windows: whose reading draws no random numbers of this process, and changes no state that a
            checkpoint holds.
        backend: begins to copy what was read.
    """

    def __init__(self, windows: Iterable[Window], backend: Backend) -> None:
        self._windows, self.backend = iter(windows), backend
        self._held: list[Window] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        if self._error is not None:
            raise self._error
        return self._held.pop() if self._held else next(self._windows)

    def load(self) -> None:
        """Read the next window, and begin to copy it to the device. An error is raised when the window is
        asked for: the step before is complete."""
        if self._held or self._error is not None:
            return
        try:
            for window in self._windows:
                self._held.append(window)
                self.backend.load_ahead(window)
                return
        except Exception as error:  # noqa: BLE001 - raised by `__next__`
            self._error = error
