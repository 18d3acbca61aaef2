"""Copies between tensors of any strides, and digests of their values."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["assign_values", "digest_of"]


def digest_of(values: Any) -> str:
    """Text that differs when a tensor in the containers `values` has another byte, or another value in them
    another ``repr``."""
    return repr(tree_map_only(Tensor, _digest, values))


def _digest(tensor: Tensor) -> tuple[torch.dtype, torch.Size, int]:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, zlib.crc32(plain.view(torch.uint8).numpy().data)


@torch.no_grad()
def assign_values(tensor: Tensor, values: Tensor) -> None:
    """``tensor.copy_(values)``, also into a tensor with dimensions that `Tensor.expand` repeats."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
