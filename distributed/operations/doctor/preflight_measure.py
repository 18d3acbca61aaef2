"""Rendezvous of the hosts: exchange their facts, measure links, clocks and an all-reduce."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from distributed.communication.rendezvous import await_ranks, open_store
from distributed.config.sections import local_path
from distributed.interfaces.placement import LauncherEnvironment
from distributed.operations.doctor.preflight_facts import Facts, own_facts
from distributed.operations.doctor.preflight_links import EchoServer, measure_links
from distributed.system.addresses import address_among, is_loopback, loopback_interface

_PINGS = 5
_BIG = 16 * 2**20
_VISIBLE = 10.0
"""Seconds in which a file of another host has to be seen; NFS keeps what it knows for some."""


@dataclass
class AllReduce:
    """One collective over all hosts, a rank on each.

    Attributes:
        transport: gloo or nccl.
        small: seconds for 4 bytes, the median of several.
        bandwidth: bytes of a 16 MiB buffer over the seconds that it took.
        error: cause of a failure; empty on success.
    """

    transport: str
    small: float = 0.0
    bandwidth: float = 0.0
    error: str = ""


@dataclass
class Survey:
    """Results of a survey.

    Attributes:
        hosts: facts by node number.
        all_reduce: None when it was not tried, since hosts cannot reach each other.
    """

    hosts: list[Facts]
    all_reduce: AllReduce | None = None


def survey(
    place: LauncherEnvironment, timeout: float, checkpoint_dir: str | None = None, use_gpus: bool = True
) -> Survey:
    """Meet the other hosts and measure. Every host calls this; all get the same survey.

    Args:
        place: this host as the only rank on its node.
        timeout: seconds to wait for the others.
        checkpoint_dir: a folder that all should share; None for none.
        use_gpus: look for CUDA devices, and reduce over them where all hosts have some.

    Raises:
        UserError: hosts that did not come, by number.
    """
    node, size = place.rank, place.size
    store = open_store(place, node, size, timedelta(seconds=timeout))
    await_ranks(store, node, size, timeout)
    exchange = _Exchange(store, node, size)
    facts = own_facts(node, address_among(place.master_addr, place.master_port or 1), use_gpus)
    server = EchoServer(is_loopback(place.master_addr))
    try:
        places = exchange.all("place", (facts.address, server.port))
        facts.clock, facts.clock_error = _clock(exchange)
        ends = {other: (p[0], p[1]) for other, p in enumerate(places)}
        # The others wait for this host's values, at most `timeout`.
        facts.links = measure_links(node, ends, timeout / 2)
        facts.checkpoint = _shared(exchange, checkpoint_dir)
        hosts = [Facts.from_dict(received) for received in exchange.all("facts", asdict(facts))]
    finally:
        server.close()
    found = Survey(hosts)
    if not any(link.error for host in hosts for link in host.links.values()):
        found.all_reduce = _worst(exchange.all("reduced", asdict(_all_reduce(place, store, hosts, timeout))))
    exchange.all("done", None)
    return found


class _Exchange:
    """Exchange of named values between all hosts, through a store."""

    def __init__(self, store: dist.Store, node: int, size: int) -> None:
        self.store, self.node, self.size = store, node, size

    def publish(self, name: str, value: Any) -> None:
        self.store.set(f"preflight/{name}", json.dumps(value))

    def receive(self, name: str) -> Any:
        return json.loads(self.store.get(f"preflight/{name}"))

    def all(self, name: str, value: Any) -> list[Any]:
        self.publish(f"{name}/{self.node}", value)
        return [self.receive(f"{name}/{other}") for other in range(self.size)]


def _clock(exchange: _Exchange) -> tuple[float, float]:
    """Seconds that this clock is ahead of node 0's, and how wrong that may be: node 0 is asked for its
    time, one host after the other, and the fastest answer counts (Cristian 1989)."""
    if exchange.node == 0:
        for other in range(1, exchange.size):
            for ping in range(_PINGS):
                exchange.receive(f"ask/{other}/{ping}")
                exchange.publish(f"time/{other}/{ping}", time.time())
        return 0.0, 0.0
    tries = []
    for ping in range(_PINGS):
        name = f"{exchange.node}/{ping}"
        before = time.time()
        exchange.publish(f"ask/{name}", None)
        there = float(exchange.receive(f"time/{name}"))
        after = time.time()
        tries.append((after - before, (before + after) / 2 - there))
    trip, ahead = min(tries[1:])  # the first waits for node 0's turn
    return ahead, trip / 2


def _shared(exchange: _Exchange, directory: str | None) -> str | None:
    """Whether all hosts see node 0's file in `directory` and can write there."""
    path = local_path(directory)
    if path is None:
        return None
    folder = Path(path)
    if exchange.node == 0:
        exchange.publish("token", secrets.token_hex(8))
    name = f".preflight_{exchange.receive('token')}"
    problem = _written(folder / f"{name}_{exchange.node}")
    exchange.all("written", problem)
    if not problem and not _seen(folder / f"{name}_0"):
        problem = f"{folder} is not the folder of node 0: its file is not there"
    exchange.all("looked", problem)
    with suppress(OSError):
        (folder / f"{name}_{exchange.node}").unlink()
    return problem


def _written(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("preflight")
    except OSError as error:
        return f"cannot write to {path.parent}: {error.strerror}"
    return ""


def _seen(path: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        os.scandir(path.parent).close()  # a look at the folder makes NFS ask its server again
        time.sleep(0.2)
    return True


def _all_reduce(
    place: LauncherEnvironment, store: dist.Store, hosts: list[Facts], timeout: float
) -> AllReduce:
    cuda = all(host.gpus for host in hosts)
    transport = "nccl" if cuda else "gloo"
    if is_loopback(place.master_addr):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    try:
        dist.init_process_group(
            transport,
            store=dist.PrefixStore("preflight/group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=min(timeout, 60.0)),
        )
        device = torch.device("cuda:0" if cuda else "cpu")
        small, big = torch.ones(1, device=device), torch.ones(_BIG // 4, device=device)
        once = _timed(lambda: dist.all_reduce(small), cuda, 10)
        return AllReduce(transport, once, _BIG / _timed(lambda: dist.all_reduce(big), cuda, 3))
    except (RuntimeError, ValueError) as error:
        return AllReduce(transport, error=str(error).partition("\n")[0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _timed(call: Callable[[], Any], cuda: bool, times: int) -> float:
    taken = []
    for _ in range(times + 1):
        started = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return median(taken[1:])  # the first makes the connections


def _worst(received: list[dict[str, Any]]) -> AllReduce:
    results = [AllReduce(**result) for result in received]
    failed = [result for result in results if result.error]
    return failed[0] if failed else max(results, key=lambda result: result.small)
