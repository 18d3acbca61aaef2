"""Rows of an in-memory tensor as a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

__all__ = ["reader_of"]

_NOT_SELECTED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that `torch.index_select` does not have (torch 2.13)."""


def reader_of(tensor: Tensor, pinned: bool, ranges: bool) -> Callable[[Tensor | slice], Tensor]:
    """A function that returns ``tensor[where]``.

    `torch.index_select` copies whole rows where indexing copies elements. What a call needs is decided here:
    it is made between two steps of training, when the processor's caches hold other code.

    Args:
        pinned: return pinned memory, from which a GPU copies without the host waiting.
        ranges: `where` is a range, and otherwise indices on the CPU.
    """
    pinned = pinned and tensor.is_cpu
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.dtype not in _NOT_SELECTED
    if ranges or not plain:
        return partial(_pinned, tensor.__getitem__) if pinned else tensor.__getitem__
    if not pinned:
        return partial(tensor.index_select, 0)
    if tensor.requires_grad:
        return partial(_pinned, partial(tensor.index_select, 0))
    return partial(_select_pinned, tensor)


def _pinned(read: Callable[[Tensor | slice], Tensor], where: Tensor | slice) -> Tensor:
    return read(where).pin_memory()


def _select_pinned(tensor: Tensor, where: Tensor | slice) -> Tensor:
    assert isinstance(where, Tensor)
    batch = torch.empty((len(where), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, where, out=batch)
