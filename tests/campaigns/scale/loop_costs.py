"""Costs of the training loop on rank 0 of N ranks."""

from __future__ import annotations

import math
import pickle
from time import process_time

from distributed import Callback
from distributed.data.order import split_window
from distributed.interfaces.callback import Context
from distributed.resilience.monitor_process import _nodes
from distributed.training import step_records
from distributed.training.reduced_interval import SENT, ReducedInterval
from distributed.training.state import OpenEpoch
from tests.campaigns.scale.peers import RANKS_PER_HOST, Costs, train

__all__ = ["loop_costs"]

Results = dict[str, float]
_STEP = ("data", "forward", "backward", "optimizer", "callback")


class _Stops(Callback):
    """Ask for a stop in the first step."""

    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        context.request_stop("enough")


def loop_costs(size: int) -> Results:
    """Counts, and CPU seconds under ``... seconds``."""
    costs = train(size)
    steps, logs = costs.entered["forward"], 2
    calls, num_bytes = (sum(counts[phase] for phase in _STEP) for counts in (costs.calls, costs.bytes))
    found = {
        # Signals are asked for about once a second: of so short a run, in some of the steps.
        "step calls": math.ceil(calls / steps),
        "step bytes": num_bytes / max(calls, 1),
        "log calls": costs.calls["record"] / logs,
        "log bytes": costs.bytes["record"] / logs,
        "epoch bytes": costs.bytes["epoch end"],
        "validation bytes": costs.bytes["validation"],
        "prepare bytes": costs.bytes["prepare"],
        "resume bytes": costs.bytes["resume"],
        "step seconds": sum(costs.seconds[phase] for phase in _STEP) / steps,
        "log seconds": costs.seconds["record"] / logs,
    }
    return found | _times(size) | _stop(size, costs) | _slices(size) | _watch(size) | _records(size)


def _times(size: int) -> Results:
    """The log step in which every rank sends its times."""
    before, step_records._TIMES = step_records._TIMES, 0.0
    try:
        costs = train(size)
    finally:
        step_records._TIMES = before
    seconds = dict.fromkeys(SENT, 0.1) | {"checksum": 1.0, "settings": 1.0}
    flags = (False, False, False, False)
    own = ReducedInterval.pack([1.0], [1.0], seconds, flags, 0, size)
    started = process_time()
    reduced = ReducedInterval.unpack(own, 1, size)
    step_records.find_straggler(reduced.phases)
    spent = process_time() - started
    return {"times bytes": max(costs.bytes["record"] / 2, 8.0 * len(own)), "times seconds": spent}


def _stop(size: int, without: Costs) -> Results:
    costs = train(size, callbacks=[_Stops()])
    return {"stop bytes": max(costs.bytes["record"] - without.bytes["record"] / 2, 0)}


def _slices(size: int) -> Results:
    """The slices of the first and the last rank, whose union over the ranks is the whole window."""
    length, batch = 4 * size + 3, 2
    first, last = (split_window(length, rank, size, batch) for rank in (0, size - 1))
    if first[0][0] != 0 or last[-1][1] != length:
        raise ValueError(f"the slices of {size} ranks do not cover {length} samples: {first}, {last}")
    started = process_time()
    for rank in range(size):
        split_window(length, rank, size, batch)
    return {"slice spans": 2 * len(first), "slice seconds": (process_time() - started) / size}


def _watch(size: int) -> Results:
    """What `MonitoredRank` gathers from ranks that another launcher started, and how hosts are told apart."""
    places = [(rank // RANKS_PER_HOST, f"node-{rank // RANKS_PER_HOST:05}") for rank in range(size)]
    folder = "/tmp/distributed-watch-0123456789"
    gathered = [*places, *([folder] + [None] * (RANKS_PER_HOST - 1)) * max(1, size // RANKS_PER_HOST)]
    started = process_time()
    nodes = _nodes(places)
    spent = process_time() - started
    if len(nodes) != max(1, size // RANKS_PER_HOST):
        raise ValueError(f"{len(nodes)} hosts of {size} ranks")
    num_bytes = sum(len(pickle.dumps(value)) for value in [*gathered, *range(size)])
    return {"watch bytes": num_bytes, "watch seconds": spent}


def _records(size: int) -> Results:
    """Records that rank 0 of another number of ranks adds up after a resume."""
    saved = [{"sums": [0.0, 0.0], "steps": [(0.5, 1.0, 0.1)] * 10} for _ in range(size)]
    started = process_time()
    epoch = OpenEpoch()
    epoch.restore(saved, 0, size + 1)
    spent = process_time() - started
    if epoch.steps[0][1] != size:
        raise ValueError(f"{epoch.steps[0][1]} samples of {size} ranks")
    return {"record values": len(pickle.dumps(saved)), "record seconds": spent}
