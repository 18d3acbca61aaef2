"""What ranks print, shown where `fit` was called."""

from __future__ import annotations

import io
import os
import queue
import socket
import sys
import threading

from ray.util.queue import Queue

__all__ = ["Relay", "Voice"]

_WAIT = 10.0
"""Seconds that the last lines may take."""


class Relay:
    """The caller's end: a thread that prints the ranks' lines, rank 0's as they are.

    Attributes:
        queue: for the ranks' ends.
        places: rank -> (host, process id).
    """

    def __init__(self) -> None:
        self.queue = Queue(actor_options={"num_cpus": 0})
        self.places: dict[int, tuple[str, int]] = {}
        self._thread = threading.Thread(target=self._show, daemon=True, name="ray-output")
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Show what has come so far, and end."""
        if self._thread.is_alive():
            self.queue.put(None)
            self._thread.join(_WAIT)
            self.queue.shutdown(force=True)

    def _show(self) -> None:
        while (item := self.queue.get()) is not None:
            rank, kind, value = item
            if kind == "place":
                self.places[rank] = value
                continue
            stream = sys.stderr if kind == "err" and rank == 0 else sys.stdout
            prefix = f"[rank {rank}] " if rank else ""
            try:
                stream.write("".join(f"{prefix}{line}" for line in value.splitlines(keepends=True)))
                stream.flush()
            except (OSError, ValueError):
                continue  # nobody listens any more; the ranks go on


class Voice:
    """A rank's end: what it prints goes to the caller line by line, and waits for nobody.

    Args:
        rank: of this process.
        to: the relay's queue.
    """

    def __init__(self, rank: int, to: Queue) -> None:
        self.rank, self._to = rank, to
        self._said: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="ray-output")
        to.put((rank, "place", (socket.gethostname(), os.getpid())))

    def __enter__(self) -> Voice:
        self._before = sys.stdout, sys.stderr
        self._lines = _Lines("out", self._said), _Lines("err", self._said)
        sys.stdout, sys.stderr = self._lines
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        sys.stdout, sys.stderr = self._before
        for lines in self._lines:
            lines.finish()
        self._said.put(None)
        self._thread.join(_WAIT)

    def _send(self) -> None:
        ended = False
        while not ended:
            batch = [self._said.get()]
            while not self._said.empty():  # what came while the last batch was under way
                batch.append(self._said.get())
            ended = None in batch
            for kind in ("out", "err"):
                if text := "".join(item[1] for item in batch if item and item[0] == kind):
                    self._to.put((self.rank, kind, text))


class _Lines(io.TextIOBase):
    """A stream that passes whole lines on."""

    def __init__(self, kind: str, to: queue.SimpleQueue[tuple[str, str] | None]) -> None:
        self._kind, self._to, self._rest = kind, to, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        whole, found, self._rest = (self._rest + text).rpartition("\n")
        if found:
            self._to.put((self._kind, whole + found))
        return len(text)

    def finish(self) -> None:
        if self._rest:
            self._to.put((self._kind, self._rest + "\n"))
            self._rest = ""
