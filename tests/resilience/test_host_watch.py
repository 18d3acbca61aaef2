"""Hosts that watch each other: who is silent, who is gone, who said farewell. Here they are threads."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from distributed import WorkerError
from distributed.communication.rendezvous import Rendezvous
from distributed.resilience.host_heartbeat import HostHeartbeat
from distributed.resilience.rank_monitor import Limits, RankMonitor

Join = Callable[..., HostHeartbeat]


@pytest.fixture
def place() -> Iterator[tuple[str, int]]:
    with Rendezvous("127.0.0.1", 0, 3) as rendezvous:
        yield "127.0.0.1", rendezvous.port


@pytest.fixture
def join(place: tuple[str, int]) -> Iterator[Join]:
    """Adds a host; all leave in the end."""
    joined = []

    def join(node: int, timeout: float | None = 1.5) -> HostHeartbeat:
        joined.append(HostHeartbeat(place, node, (2 * node, 2 * node + 1), timeout, "a run"))
        return joined[-1]

    yield join
    for watch in joined:
        watch.close()


def until(what: Callable[[], Any], why: str) -> Any:
    """What another thread brings about soon."""
    deadline = time.monotonic() + 20
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.02)
    return found


def call(place: tuple[str, int], hello: dict[str, Any] | None = None) -> socket.socket:
    """A connection to node 0 that says `hello` (with its token) and then nothing."""
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    where = json.loads(store.get("host watch a run"))
    line = socket.create_connection((where["addresses"][0], where["port"]))
    said = {"token": where["token"], "node": 1, "host": "other", "ranks": [2, 3], **(hello or {})}
    line.sendall(json.dumps(said).encode() + b"\n")
    return line


def test_hosts_that_live_lose_nobody(join: Join) -> None:
    first, second = join(0, timeout=4.0), join(1, timeout=4.0)
    until(lambda: first._peers and second._peers, "the hosts met")
    heard = first._peers[1].last_heartbeat
    until(lambda: first._peers[1].last_heartbeat - heard > 5.0, "heartbeats came for longer than that")
    assert (first.lost, second.lost) == (None, None)


def test_a_silent_host_is_named_by_all(join: Join, place: tuple[str, int], tmp_path: Path) -> None:
    first, third = join(0), join(2, timeout=None)
    with call(place):
        until(lambda: len(first._peers) == 2, "both reported")
        lost = until(lambda: first.lost, "the silent host was missed")
        assert (lost.node, lost.host, lost.ranks) == (1, "other", (2, 3))
        told = until(lambda: third.lost, "the third host was told")
    assert told == lost
    with pytest.raises(
        WorkerError, match=r"host other \(node 1, ranks 2, 3\) sent no heartbeat for"
    ) as error:
        RankMonitor(tmp_path, Limits(), third).look({})
    assert (error.value.rank, error.value.host, error.value.exc_type) == (2, "other", "HostLost")


def test_a_watch_that_ends_without_a_word_is_a_loss_and_one_that_says_farewell_is_not(
    join: Join, place: tuple[str, int]
) -> None:
    first, second = join(0), join(2)
    until(lambda: 2 in first._peers, "the second host reported")
    second.close()
    until(lambda: first._peers[2].ended, "it said farewell")
    assert first.lost_within(0.5) is None
    line = call(place)
    until(lambda: 1 in first._peers, "another reported")
    line.close()
    lost = first.lost_within(20)
    assert lost is not None
    assert lost.how.startswith("is lost")


def test_node_0_is_missed_too(place: tuple[str, int], join: Join) -> None:
    first, second = join(0), join(1)
    until(lambda: 0 in second._peers, "the hosts met")
    first._closed.set()  # it lives on, and says nothing more
    lost = until(lambda: second.lost, "node 0 was missed")
    assert (lost.node, lost.ranks) == (0, (0, 1))


def test_strangers_are_not_heard(join: Join, place: tuple[str, int]) -> None:
    first = join(0)
    with call(place, {"token": "guessed"}) as line:
        assert line.makefile("rb").read() == b""  # hung up
    assert first._peers == {}


def test_nobody_is_lost_where_nobody_was_heard(join: Join) -> None:
    """A firewall between the hosts must not end a run that trains."""
    watch = join(1, timeout=0.2)
    assert watch.lost_within(1.0) is None


def test_nothing_stays_open_of_watches_that_are_over(join: Join) -> None:
    """A process that trains again and again over several hosts would run out of sockets."""
    threads, sockets = set(threading.enumerate()), len(_open())
    first, second = join(0), join(1)
    until(lambda: first._peers and second._peers, "the hosts met")
    first.close()
    second.close()
    until(lambda: not set(threading.enumerate()) - threads, "their threads ended")
    until(lambda: len(_open()) <= sockets, "their sockets are closed")


def _open() -> list[object]:
    return [c for c in psutil.Process().net_connections("tcp4") if c.status in ("LISTEN", "ESTABLISHED")]
