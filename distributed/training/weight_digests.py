"""Digests of weights, by which a change is noticed however it was made: ``.data`` has no version counter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distributed.resilience.divergence import sum_of_bits

__all__ = ["WeightDigests"]


class WeightDigests:
    """The sum of the bits of each tensor, as they are now. It is read once on the device, without waiting.

    Args:
        tensors: name -> tensor; of one that ranks divide, this rank's part counts.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._weight_names = list(tensors)
        self._bit_sums = [sum_of_bits(tensor) for tensor in tensors.values()]

    @property
    def waits(self) -> bool:
        """True if a comparison waits for a device."""
        return any(part.device.type != "cpu" for part in self._bit_sums)

    def first_difference(self, other: WeightDigests) -> str | None:
        """The name of a tensor that has changed."""
        if self._weight_names != other._weight_names:
            return next(iter({*self._weight_names} ^ {*other._weight_names}))
        if not self._weight_names:
            return None
        device = self._bit_sums[0].device
        pairs = zip(self._bit_sums, other._bit_sums, strict=True)
        changed = torch.stack([(own != theirs).to(device, non_blocking=True) for own, theirs in pairs])
        return self._weight_names[int(changed.nonzero()[0])] if changed.any() else None
