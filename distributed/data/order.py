"""The arithmetic of data order: pure functions of (seed, epoch, position, ranks)."""

from __future__ import annotations

from itertools import pairwise

from distributed.system.derived_seed import mix

__all__ = ["epoch_seed", "mix", "share", "split_window"]


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch's sample order. Ranks have no part in it (C3)."""
    return mix(seed, epoch)


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """Rank `rank`'s contiguous slice ``[start, stop)`` of `length` samples.

    Slices differ by at most one sample and earlier ranks take the longer ones, so rank 0
    is never without a sample.
    """
    base, extra = divmod(length, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def split_window(length: int, rank: int, size: int, batch_size: int) -> list[tuple[int, int]]:
    """A rank's micro-batches within a global batch of `length` samples, as ``[start, stop)``.

    Every rank gets the same number of micro-batches, of at most `batch_size` samples;
    ranks with less data end on empty ones (``start == stop``), which become stand-ins.
    """
    start, stop = share(length, rank, size)
    longest = -(-length // size)
    count = -(-longest // batch_size)
    bounds = [min(start + i * batch_size, stop) for i in range(count + 1)]
    return list(pairwise(bounds))
