"""ArrivalRecord: metrics of the updates of asynchronous SGD, and the file that lists them."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TextIO

from distributed.errors import UserError
from distributed.training.low_communication.parameter_server import Arrival

__all__ = ["ArrivalRecord"]


class ArrivalRecord:
    """Counts the updates that a parameter server applies.

    Args:
        path: file to which a line for each update is appended; None writes no file.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | None = None) -> None:
        self._file = None if path is None else _opened(Path(path))
        self._lock = Lock()
        self._stalenesses: list[int] = []

    def __call__(self, arrival: Arrival) -> None:
        """Count an update."""
        with self._lock:
            self._stalenesses.append(arrival.staleness)
            if self._file is not None:
                self._file.write(",".join(map(str, arrival)) + "\n")

    def take(self) -> dict[str, float]:
        """``updates`` since the last call, and ``staleness_mean`` and ``staleness_max`` of them."""
        with self._lock:
            found, self._stalenesses = self._stalenesses, []
        if not found:
            return {"updates": 0.0}
        return {
            "updates": float(len(found)),
            "staleness_mean": sum(found) / len(found),
            "staleness_max": float(max(found)),
        }

    def flush(self) -> None:
        """Write what is buffered to the file."""
        with self._lock:
            if self._file is not None:
                self._file.flush()


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the file cannot be opened: {error.strerror}",
            field="low_communication.arrival_log",
            got=str(path),
            allowed="a file that rank 0 can write",
            remedy="Choose another path, or leave it out",
        ) from error
    if not file.tell():
        file.write(",".join(Arrival._fields) + "\n")
    return file
