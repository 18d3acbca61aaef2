"""Digests of weights, by which a change is noticed however it was made: ``.data`` has no version counter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["WeightDigests"]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightDigests:
    """The sum of the bits of each tensor, as they are now. It is read once on the device, without waiting.

    Args:
        tensors: name -> tensor; of one that ranks divide, this rank's part counts.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._sums = [_sum_of_bits(tensor) for tensor in tensors.values()]

    @property
    def waits(self) -> bool:
        """True if a comparison waits for a device."""
        return any(part.device.type != "cpu" for part in self._sums)

    def first_difference(self, other: WeightDigests) -> str | None:
        """The name of a tensor that has changed."""
        if self._names != other._names:
            return next(iter({*self._names} ^ {*other._names}))
        if not self._names:
            return None
        device = self._sums[0].device
        pairs = zip(self._sums, other._sums, strict=True)
        changed = torch.stack([(own != theirs).to(device, non_blocking=True) for own, theirs in pairs])
        return self._names[int(changed.nonzero()[0])] if changed.any() else None


@torch.no_grad()
def _sum_of_bits(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.is_meta or local.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    return local.view(_WHOLE[local.element_size()]).sum(dtype=torch.int64)
