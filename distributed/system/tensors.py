"""Copies between tensors of any strides."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assign_values"]


@torch.no_grad()
def assign_values(tensor: Tensor, values: Tensor) -> None:
    """``tensor.copy_(values)``, also into a tensor with dimensions that `Tensor.expand` repeats."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
