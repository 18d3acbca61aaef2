"""The factor that counts of tokens and clipping give to gradients, and one pass that multiplies by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["group_by_dtype", "inverse", "multiply_in_place", "on_host", "scale_factor"]


def scale_factor(
    ratio: Tensor | float | None, norm: Tensor | None, max_norm: float | None
) -> Tensor | float | None:
    """What gradients are multiplied by (C6); None for 1.

    Args:
        ratio: what the true count asks for; None for 1.
        norm: global L2 norm of the gradients after that; read only to clip.
        max_norm: largest norm; None does not clip.
    """
    if max_norm is None:
        return ratio
    assert norm is not None
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return clip if ratio is None else clip * ratio


def multiply_in_place(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each of `gradients` by `factor`, which may be on another device."""
    for part in group_by_dtype(gradients):
        torch._foreach_mul_(part, factor.to(part[0]) if isinstance(factor, Tensor) else factor)


def group_by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Lists of the tensors that have the same dtype and device."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def on_host(number: Any) -> Any:
    """A tensor on the CPU as a number, which costs no synchronisation; others as they are."""
    return number.item() if isinstance(number, Tensor) and number.is_cpu else number


def inverse(count: Any) -> Any:
    """1 / count; 0 where nothing counted, since the mean over nothing moves nothing."""
    if not isinstance(count, Tensor):
        return 1.0 / count if count > 0 else 0.0
    return torch.where(count > 0, count.reciprocal(), 0.0)
