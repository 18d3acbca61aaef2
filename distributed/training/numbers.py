"""Numbers that may still be on a device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["as_floats", "mean"]


def as_floats(values: list[Any]) -> list[float]:
    """Tensors and numbers as numbers, with one transfer from the device."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return [float(value) for value in values]
    found = iter(torch.stack([t.double() for t in tensors]).tolist())
    return [next(found) if isinstance(value, torch.Tensor) else float(value) for value in values]


def mean(total: float, count: float) -> float:
    """``total / count``; `total` if nothing counted, as with masked tokens. A count may be below 1."""
    return total / count if count else total
