"""Measure how long collectives take among the ranks of one node, for each size of group."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from distributed.operations.planning.measure_operations import rising

__all__ = ["group_sizes", "measure_collectives", "measure_overlap", "timed"]

_OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send-recv")
"""What steps of training call."""
_BYTES = (2**10, 2**17, 2**20, 2**22, 2**24)
_REPEATS = 2
_LEAST = 1e-6
"""Seconds of a call that takes no longer than the noise of what ranks compute between two calls."""
_OVERLAPPED = 2**24
"""Bytes of the all-reduce beside which ranks compute."""


def group_sizes(num_ranks: int) -> list[int]:
    """Numbers of ranks of equal groups of more than one rank."""
    return [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]


def measure_collectives(
    duration: float, device: str, compute: Callable[[], object]
) -> dict[str, dict[int, tuple[tuple[float, float], ...]]]:
    """Operation -> size of a group -> (bytes, seconds). All groups communicate at once. Collective.

    Ranks compute between two calls, as they do in a step: threads of a transport that have gone to sleep
    meanwhile take time to wake up. What the transport cannot do is left out.

    Args:
        duration: seconds for each point.
        compute: what ranks do between two calls.
    """
    between = _slowest(timed(compute, 20, device))
    found: dict[str, dict[int, tuple[tuple[float, float], ...]]] = {}
    for size in group_sizes(dist.get_world_size()):
        group = _own_group(size)
        for operation in _OPERATIONS:
            calls = [_call(operation, nbytes, size, group, device) for nbytes in _BYTES]
            points = [
                (float(nbytes), _point(call, compute, between, duration, device))
                for nbytes, call in zip(_BYTES, calls, strict=True)
            ]
            known = [(nbytes, seconds) for nbytes, seconds in points if seconds is not None]
            if len(known) == len(points):
                found.setdefault(operation, {})[size] = rising(known)
    return found


def _own_group(size: int) -> Any:
    """The group of `size` neighbouring ranks of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]


def _point(
    call: Callable[[], object], compute: Callable[[], object], between: float, duration: float, device: str
) -> float | None:
    try:
        call()
        call()
    except (RuntimeError, ValueError):
        return None

    def both() -> None:
        compute()
        call()

    once = _slowest(timed(both, 1, device))
    length = max(2, min(50, int(duration / _REPEATS / once)))
    each = _slowest(fmean(timed(both, length, device) for _ in range(_REPEATS)))
    return max(_LEAST, each - between)


def timed(call: Callable[[], object], length: int, device: str) -> float:
    """Mean seconds of `length` calls that all ranks begin together. Collective."""
    dist.barrier()
    start = perf_counter()
    for _ in range(length):
        call()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return (perf_counter() - start) / length


def _slowest(seconds: float) -> float:
    """The largest value of all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return float(max(found))


def _call(operation: str, nbytes: int, size: int, group: Any, device: str) -> Callable[[], object]:
    share = max(1, nbytes // 4 // size)
    whole, part = torch.ones(share * size, device=device), torch.ones(share, device=device)
    other = torch.ones_like(whole)
    rank = dist.get_rank(group)
    following, before = (rank + 1) % size, (rank - 1) % size

    def exchange() -> None:
        calls = [
            dist.P2POp(dist.isend, whole, group=group, group_peer=following),
            dist.P2POp(dist.irecv, other, group=group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send-recv": exchange,
    }
    return calls[operation]


def measure_overlap(compute: Callable[[], object], seconds: float, device: str) -> float:
    """Share of the time of an all-reduce that computation beside it hides. Collective.

    Args:
        compute: an operation.
        seconds: of one call of it.
    """
    values = torch.ones(_OVERLAPPED // 4, device=device)
    alone = _slowest(median(timed(lambda: dist.all_reduce(values), 1, device) for _ in range(5)))
    number = max(1, round(alone / seconds))

    def computed() -> None:
        for _ in range(number):
            compute()

    def both() -> None:
        work = dist.all_reduce(values, async_op=True)
        computed()
        work.wait()

    computing = _slowest(median(timed(computed, 1, device) for _ in range(5)))
    together = _slowest(median(timed(both, 1, device) for _ in range(5)))
    return min(1.0, max(0.0, (alone + computing - together) / min(alone, computing)))
