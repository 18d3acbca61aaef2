"""Costs of what hosts and launchers do: rendezvous, heartbeats, journals, plan, failure reports."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import process_time
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from distributed.communication.rendezvous import arrive, await_ranks, listen, serve
from distributed.config import DistributedConfig
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.resilience.failure_reports import FailureBoard, FailureReport, find_cause
from distributed.resilience.host_heartbeat import HostHeartbeat
from distributed.resilience.phase_journal import Journal
from distributed.resilience.rank_monitor import Limits, RankMonitor
from tests.campaigns.scale.peers import RANKS_PER_HOST

__all__ = ["CountedStore", "heartbeat_costs", "host_costs"]

Results = dict[str, float]
_WAIT = timedelta(seconds=120)


class CountedStore(dist.Store):
    """A store that counts its operations."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.calls = store, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "add", "wait", "check", "get", "compare_set"):
            self.calls += 1
            return getattr(self.store, name)
        return super().__getattribute__(name)


def host_costs(size: int) -> Results:
    """Counts and CPU seconds of all but heartbeats."""
    return _join(size) | _plan(size) | _elastic(size) | _journals(size) | _failures(size)


def _join(size: int) -> Results:
    """The last of `size` ranks joins a store that is served by this process."""
    shared = serve(listen("127.0.0.1", 0), "127.0.0.1", size, _WAIT)
    started = process_time()
    for rank in range(1, size):
        arrive(shared, rank, size)
    store = CountedStore(shared)
    await_ranks(store, 0, size, _WAIT.total_seconds())
    spent = process_time() - started
    return {"join calls": store.calls, "store keys": shared.num_keys(), "store seconds": spent}


def _plan(size: int) -> Results:
    config = DistributedConfig(
        backend="pytorch-ddp",
        num_nodes=max(1, size // RANKS_PER_HOST),
        gpus_per_node=RANKS_PER_HOST,
        num_gpus=size,
        global_batch_size=4 * size,
        device="cuda",
        rdzv_endpoint="node-00000:29500",
        node_rank=0,
    )
    started = process_time()
    plan = resolve(config, get_catalog(), Facts(), Resources(RANKS_PER_HOST))
    return {"plan values": len(pickle.dumps(plan.batch.as_dict())), "plan seconds": process_time() - started}


def _elastic(size: int) -> Results:
    """torch's state of an elastic rendezvous with all hosts, which every host reads and writes."""
    state = _RendezvousState()
    for number in range(max(1, size // RANKS_PER_HOST)):
        node = _NodeDesc(f"node-{number:05}.cluster.example", 10_000 + number, 0)
        state.participants[node] = number
        state.last_heartbeats[node] = datetime.now(UTC)
    started = process_time()
    raw = pickle.dumps(state)
    pickle.loads(raw)
    return {"elastic bytes": len(raw), "elastic seconds": process_time() - started}


def _journals(size: int) -> Results:
    """One look of a host's monitor at the journals of its ranks."""
    here = min(size, RANKS_PER_HOST)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journals = [Journal(folder, rank) for rank in range(here)]
        for journal in journals:
            journal.enter("forward", 1, 0)
        monitor = RankMonitor(folder, Limits())
        started = process_time()
        monitor.look(dict.fromkeys(range(here), os.getpid()))
        return {"journal files": len(list(folder.iterdir())), "journal seconds": process_time() - started}


def _failures(size: int) -> Results:
    """All ranks fail: they report to one board, and to files that a launcher reads if all are on its host."""
    report = FailureReport(0, "RuntimeError", "raised RuntimeError: connection closed", second_hand=True)
    board, own = dist.HashStore(), FailureReport(size - 1, "ValueError", "raised ValueError: wrong")
    board.set("other", "")
    FailureBoard(board, size - 1)._publish(own)
    for rank in range(size - 1):
        FailureBoard(board, rank)._publish(replace(report, rank=rank))
    started = process_time()
    texts = [replace(report, rank=rank, time=float(rank)).to_json() for rank in range(size - 1)]
    reports = [FailureReport.from_json(text) for text in [*texts, own.to_json()]]
    first = find_cause(reports)
    error = first.to_error(range(size))
    spent = process_time() - started
    known = FailureReport.from_json(board.get("failed/first").decode())
    if first.rank != size - 1 or known.rank != size - 1:
        raise ValueError(f"rank {size - 1} failed first, not {first.rank} or {known.rank}")
    return {"failure keys": board.num_keys(), "failure bytes": len(str(error)), "failure seconds": spent}


def heartbeat_costs(size: int, seconds: float = 3.0) -> Results:
    """The real monitor of node 0, to which fake monitors of all other hosts connect over loopback.

    Args:
        seconds: how long to measure the CPU time of heartbeats.
    """
    hosts = max(2, size // RANKS_PER_HOST)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    store = serve(listen("127.0.0.1", 0), "127.0.0.1", 1, _WAIT)
    monitor = HostHeartbeat(("127.0.0.1", store.port), 0, tuple(range(RANKS_PER_HOST)), 30.0, "scale")
    store.wait(["host watch scale"], _WAIT)
    where = json.loads(store.get("host watch scale"))
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.scale.fake_hosts",
        str(where["port"]),
        where["token"],
        str(hosts),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as others:
        try:
            _expect(others, "ready")
            opened = len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]
            started, began = process_time(), time.monotonic()
            while time.monotonic() - began < seconds:
                time.sleep(1.0)
                if monitor.lost is not None:
                    raise ValueError(f"{monitor.lost} is not lost")
            spent = (process_time() - started) / max(time.monotonic() - began, 1e-9)
            began = time.monotonic()
            print("lose one", file=others.stdin, flush=True)
            _expect(others, "detected")
            latency = time.monotonic() - began
            lost = monitor.lost_within(_WAIT.total_seconds())
            if lost is None or lost.node != hosts - 1:
                raise ValueError(f"{lost} is lost, not node {hosts - 1}")
        finally:
            monitor.close()
            others.kill()
    return {
        "heartbeats": 2 * (hosts - 1),
        "heartbeat connections": opened[0],
        "heartbeat threads": opened[1],
        "heartbeat seconds": spent,
        "loss seconds": latency,
    }


def _expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        raise ValueError(f"the fake hosts printed {line!r}, not {word!r}")
