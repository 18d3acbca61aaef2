"""The shuffled order of a large dataset as a function of the position, so that no index is kept in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from distributed.data.order import epoch_seed
from distributed.system.keyed_permutation import KeyedPermutation

__all__ = ["LARGE", "KeyedOrder", "shuffled_order"]

LARGE = 1 << 24
"""Samples from which on the order is a `KeyedOrder`; below it is ``torch.randperm``."""


class KeyedOrder(KeyedPermutation):
    """A permutation of ``0 .. length - 1`` that depends on (seed, epoch) alone.

    Args:
        length: number of samples, from 1.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        super().__init__(length, epoch_seed(seed, epoch))


def shuffled_order(length: int, seed: int, epoch: int, keyed: bool | None = None) -> Tensor | KeyedOrder:
    """The order of an epoch's samples.

    Args:
        keyed: compute it by position; None does for a large dataset.
    """
    if length >= LARGE if keyed is None else keyed:
        return KeyedOrder(length, seed, epoch)
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))
