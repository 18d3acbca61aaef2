"""Ports for servers that a test starts."""

from __future__ import annotations

import itertools
import os
import random
import socket

__all__ = ["free_port"]

_FIRST, _EACH = 20_000, 1_000
_WORKERS = 9
"""Workers of pytest-xdist with a part of their own. All parts end below 29500, the default of torchrun, and
below 32768, from where on Linux takes the ports of connections and of servers that name none."""

_next = itertools.count(random.SystemRandom().randrange(_EACH))
"""Begins anywhere, because the tests of two checkouts may run at the same time."""


def free_port() -> int:
    """A port that no process has on any interface, and that no other test of this run is given.

    One that the kernel has chosen could be gone before the test's server binds it: the kernel gives it to any
    connection that is made meanwhile.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for number in itertools.islice(_next, _EACH):
        port = _FIRST + worker * _EACH + number % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"all ports from {_FIRST + worker * _EACH} on are taken")
