"""A permutation of a range of numbers as a function of the position, of which nothing is kept in memory.

A Feistel network over pairs of numbers is a permutation whatever its round function is: each of its rounds
adds to one number a hash of the other one, which can be subtracted again. The pairs stand for a few more
numbers than there are; a result beyond them goes through the network again, until it is one of them
(cycle walking), which keeps the map one to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distributed.system.derived_seed import mix

__all__ = ["KeyedPermutation"]

_ROUNDS = 8
_BLOCK = 1 << 13  # what the network's arrays of this length need stays in a core's cache
_SHIFT = np.uint64(32)
_FACTORS = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)

_Numbers = NDArray[np.uint64]


class KeyedPermutation:
    """A permutation of ``0 .. length - 1`` that depends on `key` alone. Any part of it is computed at once,
    in tens of nanoseconds per number.

    Args:
        length: from 1.
    """

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        first = isqrt(length - 1) + 1
        # Fewer than `first` pairs are beyond them: hardly a number goes through the network twice.
        self._sizes = first, -(-length // first)
        self._keys = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: slice) -> Tensor:
        """The numbers at the positions of a slice without a step, int64."""
        start, stop, _ = where.indices(self.length)
        return self.at(torch.arange(start, max(start, stop)))

    def pieces(self, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The numbers of each ``[start, stop)``, in one computation, which is faster than one for each."""
        positions = torch.cat([torch.arange(start, stop) for start, stop in spans])
        return iter(self.at(positions).split([stop - start for start, stop in spans]))

    def at(self, positions: Tensor) -> Tensor:
        """The numbers at `positions`, int64 of one dimension, which lie in ``0 .. length - 1``."""
        found = positions.numpy().astype(np.uint64)
        for part in np.split(found, range(_BLOCK, len(found), _BLOCK)):
            self._walk(part)
        return torch.from_numpy(found.view(np.int64))

    def _walk(self, numbers: _Numbers) -> None:
        """Replace positions by numbers, in place."""
        numbers[:] = self._permuted(numbers)
        while (beyond := np.flatnonzero(numbers >= np.uint64(self.length))).size:
            numbers[beyond] = self._permuted(numbers[beyond])

    def _permuted(self, numbers: _Numbers) -> _Numbers:
        rows, columns = map(np.uint64, self._sizes)
        one, other = numbers // columns, numbers % columns
        sizes = rows, columns
        for number, key in enumerate(self._keys):
            one += _hash(other, key) % sizes[number % 2]
            one %= sizes[number % 2]
            one, other = other, one
        return one * columns + other


def _hash(numbers: _Numbers, key: np.uint64) -> _Numbers:
    """64 mixed bits of each number; the products wrap around."""
    mixed = numbers ^ key
    for factor in _FACTORS:
        mixed *= factor
        mixed ^= mixed >> _SHIFT
    return mixed
