"""The arithmetic of data order: pure functions of (seed, epoch, position, ranks)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, repeat

from distributed.system.derived_seed import mix

__all__ = ["epoch_seed", "mix", "share", "split_window", "window_sizes"]


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


def split_window(
    length: int, rank: int, size: int, batch_size: int, fewest: int = 1
) -> list[tuple[int, int]]:
    """A rank's micro-batches within a global batch of `length` samples, as ``[start, stop)``.

    Every rank gets the same number of micro-batches, of at most `batch_size` samples;
    ranks with less data end on empty ones (``start == stop``), which become placeholders.

    Args:
        fewest: samples that a micro-batch with samples has at least, as far as `length` allows; at most
            `batch_size`. A micro-batch may have ``fewest - 1`` samples more than `batch_size` for that.
    """
    users = min(size, max(length // fewest, 1))
    start, stop = share(length, rank, users) if rank < users else (length, length)
    own = stop - start
    count, parts = (_num_parts(samples, batch_size, fewest) for samples in (-(-length // users), own))
    if 0 < own % batch_size < fewest:
        ends = [start + share(own, part, parts)[1] for part in range(parts)]
    else:
        ends = [min(start + (part + 1) * batch_size, stop) for part in range(parts)]
    return list(pairwise([start, *ends, *[stop] * (count - parts)]))


def _num_parts(length: int, batch_size: int, fewest: int) -> int:
    """Number of micro-batches for `length` samples of a rank."""
    parts = -(-length // batch_size)
    return min(parts, max(length // fewest, 1)) if 0 < length % batch_size < fewest else parts


def window_sizes(length: int, size: int, fewest: int = 0, joins: bool = False) -> Iterator[int]:
    """Yield the samples of each window of `length` samples: `size`, and what is left over.

    Args:
        fewest: samples that a window has at least; the last two windows are divided for that, if they have
            twice as many.
        joins: they become one if they have not.
    """
    full, rest = divmod(length, size)
    both = size + rest
    if full and 0 < rest < fewest and both // 2 >= fewest:
        return chain(repeat(size, full - 1), [both - both // 2, both // 2])
    if full and 0 < rest < fewest and joins:
        return chain(repeat(size, full - 1), [both])
    return chain(repeat(size, full), [rest] * bool(rest))
