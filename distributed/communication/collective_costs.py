"""What collectives cost: bytes and messages of each rank by formula, and time by latency and bandwidth.

Nothing here needs a framework. Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005, for the algorithms; PERFORMANCE.md of nccl-tests for `BUS_FACTORS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ALGORITHMS",
    "BUS_FACTORS",
    "OPERATIONS",
    "Algorithm",
    "Path",
    "RankTraffic",
    "chunk_bounds",
    "core_size",
    "ideal_bytes",
    "tree_children",
]


class RankTraffic(NamedTuple):
    """What one rank sends.

    Attributes:
        messages: number of messages that are not empty.
        elements: elements of the tensor in all of them.
    """

    messages: int
    elements: int


class Path(NamedTuple):
    """The longest chain of messages that follow each other.

    Attributes:
        messages: their number.
        tensors: what they carry, in units of the whole tensor.
    """

    messages: int
    tensors: float

    def seconds(self, nbytes: float, latency: float, bandwidth: float) -> float:
        """Time of the collective in the alpha-beta model, without the time of the additions.

        Args:
            nbytes: size of the tensor.
            latency: seconds that a message takes apart from its bytes (alpha).
            bandwidth: bytes per second of a link (1 / beta).
        """
        return self.messages * latency + self.tensors * nbytes / bandwidth


def chunk_bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each of `size` chunks of `numel` elements, whose lengths differ by one at most."""
    marks = [numel * index // size for index in range(size + 1)]
    return list(itertools.pairwise(marks))


def core_size(size: int) -> int:
    """The largest power of two that is not above `size`: ranks that halve and double."""
    return 1 << (size.bit_length() - 1)


def tree_children(rank: int, size: int) -> list[int]:
    """The ranks below `rank` in the binary tree in which rank r is below rank (r - 1) // 2."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]


@dataclass(frozen=True)
class Algorithm:
    """The costs of an all-reduce.

    Attributes:
        traffic: (rank, number of ranks, elements) -> what the rank sends.
        path: number of ranks -> messages that follow each other.
    """

    traffic: Callable[[int, int, int], RankTraffic]
    path: Callable[[int], Path]


def _sum_of(lengths: Iterator[int]) -> RankTraffic:
    sent = [length for length in lengths if length]
    return RankTraffic(len(sent), sum(sent))


def _ring_traffic(rank: int, size: int, numel: int) -> RankTraffic:
    lengths = [end - start for start, end in chunk_bounds(numel, size)]
    reduced = (lengths[(rank - step) % size] for step in range(size - 1))
    gathered = (lengths[(rank + 1 - step) % size] for step in range(size - 1))
    return _sum_of(length for part in (reduced, gathered) for length in part)


def _ring_path(size: int) -> Path:
    return Path(2 * (size - 1), 2 * (size - 1) / size)


def _tree_traffic(rank: int, size: int, numel: int) -> RankTraffic:
    links = len(tree_children(rank, size)) + (rank > 0)
    return _sum_of(numel for _ in range(links))


def _tree_path(size: int) -> Path:
    # The first rank of a level has two children, one or, on the last level, none; they share its link.
    first_ranks = [2**level - 1 for level in range(size.bit_length())]
    messages = 2 * sum(len(tree_children(rank, size)) for rank in first_ranks if rank < size)
    return Path(messages, float(messages))


def _halving_traffic(rank: int, size: int, numel: int) -> RankTraffic:
    core = core_size(size)
    if rank >= core:
        return _sum_of(iter([numel]))
    return _sum_of(_halving_lengths(rank, size, core, numel))


def _halving_lengths(rank: int, size: int, core: int, numel: int) -> Iterator[int]:
    start, end, distance = 0, numel, core // 2
    while distance:
        middle = (start + end) // 2
        below, above = (start, middle), (middle, end)
        kept, given = (above, below) if rank & distance else (below, above)
        yield given[1] - given[0]
        yield kept[1] - kept[0]  # on the way back
        (start, end), distance = kept, distance // 2
    if rank + core < size:
        yield numel


def _halving_path(size: int) -> Path:
    core = core_size(size)
    folds = 2 * (core < size)
    return Path(2 * (core.bit_length() - 1) + folds, 2 * (core - 1) / core + folds)


ALGORITHMS = {
    "ring": Algorithm(_ring_traffic, _ring_path),
    "tree": Algorithm(_tree_traffic, _tree_path),
    "halving-doubling": Algorithm(_halving_traffic, _halving_path),
}
"""Name -> costs of an all-reduce by that algorithm."""


def _all_reduce(size: int) -> float:
    return 2 * (size - 1) / size


def _others(size: int) -> float:
    return (size - 1) / size


def _one(size: int) -> float:
    return 1.0


BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _others,
    "all-gather": _others,
    "broadcast": _one,
    "all-to-all": _others,
    "send-recv": _one,
}
"""Operation -> number of ranks -> busbw / algbw, by the convention of nccl-tests."""

OPERATIONS = tuple(BUS_FACTORS)


def ideal_bytes(operation: str, nbytes: int, size: int) -> float:
    """The fewest bytes that ranks have to send in an operation on `nbytes`, as the mean over the ranks.

    `nbytes` is what nccl-tests calls size: the largest buffer of a rank, which is the whole result of an
    all-gather and the whole input of a reduce-scatter.
    """
    # A broadcast has to reach all ranks but one, which one rank or several may do.
    factor = _others if operation == "broadcast" else BUS_FACTORS[operation]
    return nbytes * factor(size)
