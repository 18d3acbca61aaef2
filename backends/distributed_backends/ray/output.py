"""Forward the ranks' output to the caller of `fit`."""

from __future__ import annotations

import io
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distributed.resilience.preemption import record_signal
from distributed.system.output import write_text

_WAIT = 10.0
"""Time limit for the last lines, in seconds."""
_LOOK = 0.5
"""Seconds between polls for the caller's requests."""


class Relay:
    """The caller's end: a thread that prints the ranks' lines, rank 0's as they are.

    Attributes:
        orders: queue of requests from `ask`, for rank 0; None where requests are not possible.
        places: rank -> (host, process id).
        num_starts: number of starts of rank 0.

    Args:
        asks: whether `ask` is possible.
    """

    def __init__(self, asks: bool) -> None:
        # On the caller's node: on any other, its end would be that of every restart as well.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        place = {"num_cpus": 0, "scheduling_strategy": here}
        self.queue = Queue(actor_options=place)
        self.orders = Queue(actor_options=place) if asks else None
        self.places: dict[int, tuple[str, int]] = {}
        self.num_starts = 0
        self._thread = threading.Thread(target=self._show, daemon=True, name="ray-output")
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Print the received lines, and end."""
        if self._thread.is_alive():
            with suppress(RayError):  # the cluster is gone: the ranks' own errors are reported
                self.queue.put(None)
                self._thread.join(_WAIT)
                self.queue.shutdown(force=True)
                if self.orders is not None:
                    self.orders.shutdown(force=True)

    def ask(self, name: str) -> None:
        """Request that rank 0 saves and exits, as signal `name` does. In a thread: a handler of signals may
        interrupt Ray in the middle of something."""
        assert self.orders is not None
        threading.Thread(target=self.orders.put, args=(name,), daemon=True).start()

    def _next(self) -> Any:
        try:
            return self.queue.get()
        except RayError:
            return None  # the cluster is gone, which the thread that waits for the run reports

    def _show(self) -> None:
        while (item := self._next()) is not None:
            rank, kind, value = item
            if kind == "place":
                self.places[rank] = value
                self.num_starts += rank == 0
                continue
            stream = sys.stderr if kind == "err" and rank == 0 else sys.stdout
            prefix = f"[rank {rank}] " if rank else ""
            write_text("".join(f"{prefix}{line}" for line in value.splitlines(keepends=True)), stream)


class OutputSender:
    """A rank's end: forwards its output to the caller line by line, without blocking."""

    def __init__(self, rank: int, to: Queue) -> None:
        self.rank, self._to = rank, to
        self._pending: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="ray-output")
        to.put((rank, "place", (socket.gethostname(), os.getpid())))

    def __enter__(self) -> OutputSender:
        self._before = sys.stdout, sys.stderr
        self._lines = _Lines("out", self._pending), _Lines("err", self._pending)
        sys.stdout, sys.stderr = self._lines
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        sys.stdout, sys.stderr = self._before
        for lines in self._lines:
            lines.finish()
        self._pending.put(None)
        self._thread.join(_WAIT)

    def _send(self) -> None:
        ended = False
        while not ended:
            batch = [self._pending.get()]
            while not self._pending.empty():  # lines printed while the last batch was being sent
                batch.append(self._pending.get())
            ended = None in batch
            for kind in ("out", "err"):
                if text := "".join(item[1] for item in batch if item and item[0] == kind):
                    self._to.put((self.rank, kind, text))


def forward_requests(orders: Queue) -> None:
    """In rank 0: deliver the caller's requests as signals, until Ray is gone.

    It polls instead of waiting in `orders.get`, because an item would go to a killed rank 0 that waited for
    it, and not to its successor. A request stays in the queue for that one."""

    def wait() -> None:
        with suppress(RayError):
            while True:
                with suppress(Empty):
                    name = orders.get_nowait()
                    orders.put(name)
                    return record_signal(name)
                time.sleep(_LOOK)

    threading.Thread(target=wait, daemon=True, name="ray-orders").start()


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
