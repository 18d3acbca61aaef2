"""Slow links between the hosts of a `Network`: a rate by the kernel's token bucket, a delay by a relay."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.hosts import Host, Network, can_have_hosts

__all__ = ["LinkError", "limit_rate", "with_delay"]

_NEW_NETWORK = 0x40000000
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU = 9000
_LIBC = ctypes.CDLL(None, use_errno=True)


class LinkError(RuntimeError):
    """The links cannot be made here."""


def check_rights() -> None:
    """Raise a LinkError if this process cannot make networks."""
    reason = can_have_hosts()
    if reason is not None:
        raise LinkError(
            f"slow links are made of network namespaces; {reason}. Run it as root, in a container with"
            " --cap-add=NET_ADMIN --cap-add=SYS_ADMIN and /dev/net/tun"
        )


def limit_rate(host: Host, rate: str) -> None:
    """Limit what `host` sends.

    Args:
        rate: as ``tc`` reads it, such as ``100mbit``.
    """
    bucket = ["burst", "128kb", "latency", "200ms"]
    command = [
        "tc",
        "-n",
        host.namespace,
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        rate,
        *bucket,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def with_delay(network: Network, one: str, other: str, seconds: float) -> Iterator[tuple[str, str]]:
    """A second link between two hosts, which delivers each packet after `seconds`: the kernel may lack netem.

    Yields:
        The addresses of the two hosts on it, whose device is ``tun0``.
    """
    addresses = "10.213.8.1", "10.213.8.2"
    ends = [
        _open_tunnel(network[name], address) for name, address in zip((one, other), addresses, strict=True)
    ]
    done = threading.Event()
    relay = threading.Thread(target=_relay, args=(ends, seconds, done))
    relay.start()
    try:
        yield addresses
    finally:
        done.set()
        relay.join()
        for end in ends:
            os.close(end)


def _open_tunnel(host: Host, address: str) -> int:
    """Descriptor of a new device ``tun0`` of `host`."""
    found: list[int | OSError] = []

    def open_there() -> None:
        try:
            with open(f"/run/netns/{host.namespace}") as namespace:
                if _LIBC.setns(namespace.fileno(), _NEW_NETWORK):  # of this thread
                    raise OSError(ctypes.get_errno(), "setns")
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH14x", b"tun0", _TUN_WITHOUT_HEADER))
            found.append(end)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    (end,) = found
    if isinstance(end, OSError):
        raise LinkError(f"no tunnel in {host.namespace}: {end}") from end
    for words in (
        ("address", "add", f"{address}/24", "dev", "tun0"),
        ("link", "set", "tun0", "mtu", str(_MTU), "up"),
    ):
        subprocess.run(["ip", "-n", host.namespace, *words], check=True, capture_output=True)
    return end


def _relay(ends: list[int], seconds: float, done: threading.Event) -> None:
    """Carry packets between the two ends, each `seconds` after it was sent."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while not done.is_set():
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
        readable, _, _ = select.select(ends, [], [], min(pause, 0.05))
        now = time.monotonic()
        for end in readable:
            target = ends[1] if end == ends[0] else ends[0]
            with contextlib.suppress(BlockingIOError):
                while True:
                    heapq.heappush(waiting, (now + seconds, number, target, os.read(end, _MTU + 64)))
                    number += 1
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):  # a full queue drops packets, as a router does
                os.write(target, packet)
