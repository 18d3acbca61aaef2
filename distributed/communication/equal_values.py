"""Compare a value over all ranks at a cost that does not grow with their number, while they are equal."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from distributed.interfaces.collectives import Ranks

__all__ = ["NUM_TERMS", "are_equal", "digest_of", "differences", "equality_terms", "have_equal"]

_BITS = 13
"""Bits of a piece: the sum of the squares of 2**27 pieces is still an exact float64."""
_PIECES = -(-64 // _BITS)
NUM_TERMS = 2 * _PIECES
"""Numbers that `equality_terms` returns."""


def equality_terms(value: float) -> list[float]:
    """One rank's addends, pieces of the bits of `value` and their squares. From their sums over all ranks,
    `are_equal` finds out whether every rank has the same bits."""
    bits = int.from_bytes(struct.pack("<d", value), "little")
    pieces = [bits >> _BITS * number & (1 << _BITS) - 1 for number in range(_PIECES)]
    return [float(term) for piece in pieces for term in (piece, piece * piece)]


def are_equal(sums: Sequence[float], size: int) -> bool:
    """Whether the `size` ranks whose `equality_terms` were summed have the same value.

    By the inequality of Cauchy and Schwarz, the square of a sum of n numbers is n times the sum of their
    squares only if all are equal. The sums are exact, so that every rank decides the same.
    """
    pairs = zip(map(int, sums[::2]), map(int, sums[1::2]), strict=True)
    return all(total * total == size * squares for total, squares in pairs)


def digest_of(value: Any) -> float:
    """A whole number below 2**52 that tells values of different ``repr`` apart."""
    raw = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return float(int.from_bytes(raw, "little") >> 12)


def have_equal(ranks: Ranks, value: Any) -> bool:
    """Whether `value` has the same ``repr`` on all ranks. Collective: one small sum."""
    size = ranks.world.size
    return size == 1 or are_equal(ranks.all_reduce(equality_terms(digest_of(value))), size)


def differences(ranks: Ranks, value: Any) -> Iterator[tuple[int, Any, Any]]:
    """Values that differ from rank 0's: (lowest rank that has it, rank 0's, that rank's). Collective: every
    rank has to take equally many.

    If all are equal, only a small sum is exchanged; otherwise also a number from each rank, and the values
    that are yielded.
    """
    if have_equal(ranks, value):
        return
    digests = ranks.gather_objects(digest_of(value))
    first = ranks.broadcast_object(value)
    for digest in dict.fromkeys(digests):
        if digest != digests[0]:
            rank = digests.index(digest)
            yield rank, first, ranks.broadcast_object(value, rank)
