"""LossSum: a sum of losses that stays on the device as the means that it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossSum", "as_floats"]


class LossSum:
    """Means of micro-batches times their counts, multiplied and added on the host when they are read: each
    would be a launch in every step, and rounded.

    Args:
        terms: (mean on the device, count).
    """

    __slots__ = ("terms",)

    def __init__(self, *terms: tuple[Tensor, float]) -> None:
        self.terms = terms

    def __add__(self, other: Any) -> LossSum:
        if isinstance(other, LossSum):
            return LossSum(*self.terms, *other.terms)
        if not isinstance(other, Tensor) and other == 0:
            return self
        return LossSum(*self.terms, (torch.as_tensor(other), 1.0))

    __radd__ = __add__

    def __float__(self) -> float:
        if len(self.terms) == 1:
            mean, count = self.terms[0]
            return mean.item() * count
        return as_floats([self])[0]


def as_floats(values: Sequence[Any]) -> list[float]:
    """Tensors, numbers and sums of losses as numbers, with one transfer from the device."""
    tensors = [tensor for value in values for tensor in _tensors(value)]
    if not tensors:
        return [float(value) for value in values]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        tensors = [tensor.to(tensors[0].device, torch.float64) for tensor in tensors]
    found = iter(torch.stack(tensors).double().tolist())
    return [_read(value, found) for value in values]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, LossSum):
        return [tensor for tensor, _ in value.terms]
    return [value] if isinstance(value, Tensor) else []


def _read(value: Any, found: Iterator[float]) -> float:
    """`value`, whose tensors are the next of `found`."""
    if isinstance(value, LossSum):
        return sum((next(found) * count for _, count in value.terms), 0.0)
    return next(found) if isinstance(value, Tensor) else float(value)
