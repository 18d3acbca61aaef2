"""Sharded tensors, torch's DTensor: which elements of the whole tensor this rank holds."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.errors import UserError
from distributed.interfaces.state import StateReader


class Shard(NamedTuple):
    """One rank's elements of a tensor.

    Attributes:
        start: the first of them in the flattened whole tensor.
        data: the elements, in the shape in which this rank holds them; live.
        copy: which of the `copies` this rank's is.
        copies: how many ranks hold the same elements.
    """

    start: int
    data: Tensor
    copy: int
    copies: int


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor."""
    # There is none before its module was imported, which costs time that others need not spend.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_elements(tensor: Any) -> Shard:
    """This rank's share of a DTensor cut by rows over one mesh axis, and equal along others.

    Raises:
        UserError: it is cut in another way.
    """
    start, copy, copies, cuts = 0, 0, 1, 0
    for axis, placement in enumerate(tensor.placements):
        size, place = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        if placement.is_replicate():
            copy, copies = copy * size + place, copies * size
        elif placement.is_shard(0) and not cuts:
            rows = tensor.shape[0]
            start = min(-(-rows // size) * place, rows) * math.prod(tensor.shape[1:])
            cuts = 1
        else:
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} is cut as {tuple(tensor.placements)}, which is"
                " not one range of its elements",
                allowed="(Replicate()..., Shard(0))",
            )
    return Shard(start, local_part(tensor), copy, copies)


def own_share(tensor: Any, part: int, parts: int) -> tuple[int, Tensor]:
    """Slice `part` of `parts` of a tensor's elements; of a DTensor, the slice of this rank's rows that it
    shares with the ranks that hold the same.

    Returns:
        (the first of its elements in the flattened whole tensor, the elements, 1-dimensional, live).
    """
    first = 0
    if is_sharded(tensor):
        first, tensor, part, parts = own_elements(tensor)
    length = tensor.numel()
    start, end = length * part // parts, length * (part + 1) // parts
    return first + start, tensor.detach().reshape(-1)[start:end]


def local_part(tensor: Any) -> Tensor:
    """What this rank holds of `tensor`, live; all of it where it is not sharded."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    part: Tensor = tensor.detach().to_local()
    return part


def whole(tensor: Any) -> Tensor:
    """All of `tensor`, on every rank; collective where it is sharded."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    gathered: Tensor = tensor.detach().full_tensor()
    return gathered


def read_part(reader: StateReader, key: str, name: str, tensor: Any) -> Tensor:
    """Of a saved tensor, the elements that this rank holds of `tensor`, in that shape."""
    start, data = own_elements(tensor)[:2] if is_sharded(tensor) else (0, tensor)
    value: Tensor = reader.read(key, name, start, data.numel())
    return value.reshape(data.shape)


@torch.no_grad()
def cut_like(tensor: Any, full: Tensor) -> Tensor:
    """`full`, of the DTensor `tensor`'s shape and the same on all ranks, cut as `tensor` is."""
    start, data, _, _ = own_elements(tensor)
    return wrap_like(tensor, full.detach().reshape(-1)[start : start + data.numel()].reshape(data.shape))


@torch.no_grad()
def wrap_like(tensor: Any, part: Tensor) -> Tensor:
    """A tensor cut as `tensor` is, of which this rank holds a copy of `part`, in its dtype."""
    made = torch.zeros_like(tensor, dtype=part.dtype, requires_grad=False)
    local_part(made).copy_(part)
    return made
