"""Broadcast of tensors in place, whatever their dtype and strides."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.system.tensors import assign_values

__all__ = ["broadcast_values"]


@torch.no_grad()
def broadcast_values(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Copy one rank's values into each tensor, in place. Collective.

    Args:
        tensors: of equal shapes and dtypes on all ranks; strides may differ.
        group: the ranks; None for all.
        source: index, in the group, of the rank that has the values.
    """
    for tensor in tensors:
        wire = tensor.detach().contiguous()
        # As bytes, because gloo and NCCL lack some dtypes (int16, complex).
        if wire.numel():
            dist.broadcast(wire.reshape(-1).view(torch.uint8), group=group, group_src=source)
        if wire.data_ptr() != tensor.data_ptr():
            assign_values(tensor, wire)
