"""Measure round trip and bandwidth between hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from distributed.operations.doctor.preflight_facts import Link

_PATIENCE = 5.0
"""Seconds in which a host has to answer."""
_TRIPS = 10
_PAYLOAD = 8 * 2**20
_ALL_PAIRS = 32
"""Up to this many hosts every pair is tried; beyond, each tries those at distances 1, 2, 4, ..."""


class EchoServer:
    """Answers `measure_links` of the other hosts until it is closed.

    Args:
        loopback: listen on the loopback interface alone, for hosts that are all this one.
    """

    def __init__(self, loopback: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[line], daemon=True).start()

    @staticmethod
    def _answer(line: socket.socket) -> None:
        """One byte back for each of the first bytes, then one for the whole payload."""
        with line, suppress(OSError):
            line.settimeout(60.0)
            for _ in range(_TRIPS):
                line.sendall(line.recv(1))
            left = _PAYLOAD
            while left > 0 and (got := len(line.recv(min(left, 2**16)))):
                left -= got
            line.sendall(b"!")


def measure_links(node: int, places: Mapping[int, tuple[str, int]], within: float) -> dict[int, Link]:
    """The links from `node` to the others.

    Args:
        places: node -> address and port of its `EchoServer`.
        within: seconds for all of them together.

    Returns:
        other node -> link; the hosts measure at the same time, so a bandwidth is under load.
    """
    ends = time.monotonic() + within
    return {other: _measure(*places[other], ends) for other in _partners(node, len(places))}


def _partners(node: int, number: int) -> list[int]:
    steps = list(range(1, number))
    if number > _ALL_PAIRS:
        steps = [2**power for power in range((number - 1).bit_length())]
    return [(node + step) % number for step in steps]


def _measure(address: str, port: int, ends: float) -> Link:
    left = ends - time.monotonic()
    if left <= 0:
        return Link(f"{address}:{port}: not tried: the links before it took too long")
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as line:
            line.settimeout(left)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trip = min(_trip(line) for _ in range(_TRIPS))
            started = time.perf_counter()
            line.sendall(bytes(_PAYLOAD))
            line.recv(1)
            return Link("", round_trip, _PAYLOAD / (time.perf_counter() - started))
    except OSError as error:
        return Link(f"{address}:{port}: {error.strerror or error}")


def _trip(line: socket.socket) -> float:
    started = time.perf_counter()
    line.sendall(b".")
    if not line.recv(1):
        raise OSError("hung up")
    return time.perf_counter() - started
