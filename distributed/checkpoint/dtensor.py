"""Sharded tensors, torch's DTensor: which elements of the whole tensor this rank holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.errors import UserError
from distributed.interfaces.state import StateReader
from distributed.system.boxes import first_element, is_one_range

_BITS = {4: torch.int32, 8: torch.int64}
"""Integers that gloo and NCCL add."""

Run = tuple[int, int]
"""First index and number of indices along one dimension."""


class Piece(NamedTuple):
    """A box of a whole tensor that this rank holds.

    Attributes:
        offsets: index of its first element along each dimension.
        data: its elements, in the shape of the box; live.
        place: where they are in this rank's part.
    """

    offsets: tuple[int, ...]
    data: Tensor
    place: tuple[slice, ...] = ()

    @property
    def box(self) -> tuple[slice, ...]:
        """Its indices in the whole tensor."""
        return tuple(
            slice(offset, offset + length)
            for offset, length in zip(self.offsets, self.data.shape, strict=True)
        )


class Share(NamedTuple):
    """A part of a whole tensor that one rank saves.

    Attributes:
        start: its first element in the flattened whole tensor.
        data: its elements, 1-dimensional.
        offsets: index of the first element along each dimension, if it is a box; empty for a range.
        lengths: extent of the box; empty for a range.
    """

    start: int
    data: Tensor
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor."""
    # There is none before its module was imported, which costs time that others need not spend.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_pieces(tensor: Any) -> list[Piece]:
    """The boxes of a tensor that this rank holds; of one that is not sharded all of it.

    Raises:
        UserError: it is cut along one dimension by several axes of a mesh in an order that is not known.
    """
    if not is_sharded(tensor):
        return [Piece((0,) * tensor.dim(), tensor.detach())]
    local = local_part(tensor)
    runs = [list(_with_places(_runs(tensor, dim))) for dim in range(tensor.dim())]
    found = []
    for box in product(*runs):
        place = tuple(slice(first, first + length) for _, first, length in box)
        found.append(Piece(tuple(start for start, _, _ in box), local[place] if place else local, place))
    return found


def _runs(tensor: Any, dim: int) -> list[Run]:
    """Indices along `dim` that this rank holds, in the order in which it holds them.

    The last axis of the mesh has cut first (tensor parallelism), those before it cut what it has left (FSDP).
    A ``_StridedShard`` says so of the latter; of the former it is the number of parts, such as the three of a
    fused projection, each of which is cut by itself.
    """
    found: list[Run] = [(0, tensor.shape[dim])]
    cuts = [(axis, p) for axis, p in enumerate(tensor.placements) if getattr(p, "dim", None) == dim]
    ranks = 1
    for axis, placement in reversed(cuts):
        size, place = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        parts = getattr(placement, "split_factor", 1)
        if ranks > 1 and parts != ranks:
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} is cut as {tuple(tensor.placements)}, so that it is"
                " not known which of its elements this rank holds",
                allowed="one axis of the mesh for each dimension, or FSDP over tensor parallelism",
            )
        found = _part(found, size, place, 1 if ranks > 1 else parts)
        ranks *= size
    return found


def _part(runs: list[Run], size: int, place: int, parts: int) -> list[Run]:
    """Of each of `parts` equal parts of the indices, slice `place` of `size` as torch.chunk makes them."""
    total = sum(length for _, length in runs)
    found: list[Run] = []
    for part in range(parts):
        width = total // parts
        rows = -(-width // size)
        low, high = min(place * rows, width), min((place + 1) * rows, width)
        found += _between(runs, part * width + low, part * width + high)
    return found


def _between(runs: list[Run], low: int, high: int) -> Iterator[Run]:
    """The indices at places `low` to `high` of `runs`."""
    place = 0
    for start, length in runs:
        first, last = max(low - place, 0), min(high - place, length)
        if first < last:
            yield start + first, last - first
        place += length


def _with_places(runs: list[Run]) -> Iterator[tuple[int, int, int]]:
    """(first index in the whole tensor, in this rank's part, number of indices)"""
    place = 0
    for start, length in runs:
        yield start, place, length
        place += length


def own_copies(tensor: Any) -> tuple[int, int]:
    """Which of the copies of its elements this rank holds, and how many there are on the tensor's mesh."""
    copy, copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(axis)
            copy, copies = copy * size + tensor.device_mesh.get_local_rank(axis), copies * size
    return copy, copies


def own_shares(tensor: Any, copy: int, copies: int) -> list[Share]:
    """Slice `copy` of `copies` of what this rank holds of a tensor, as do the other ranks that hold the same.

    A range of the flattened tensor is cut into ranges, a box along its first dimension.
    """
    shape = tuple(tensor.shape)
    found = []
    for offsets, data, _ in own_pieces(tensor):
        one_range = is_one_range(shape, tuple(data.shape))
        length = data.numel() if one_range else len(data)
        low, high = length * copy // copies, length * (copy + 1) // copies
        if one_range:
            flat = data.reshape(-1)[low:high]
            found.append(Share(first_element(shape, offsets) + low if data.numel() else 0, flat))
        else:
            offsets, data = (offsets[0] + low, *offsets[1:]), data[low:high]
            start = first_element(shape, offsets)
            found.append(Share(start, data.reshape(-1), offsets, tuple(data.shape)))
    return found


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
    if _is_cut_in_parts_twice(tensor):
        return _gathered(tensor)
    gathered: Tensor = tensor.detach().full_tensor()
    return gathered


def _is_cut_in_parts_twice(tensor: Any) -> bool:
    """Whether the last axis of the mesh has cut each part of a fused dimension, and another axis what was
    left: torch puts these together in another order (torch 2.13)."""
    *outer, last = tensor.placements
    fused = getattr(last, "split_factor", 1) > 1
    return fused and any(getattr(placement, "dim", None) == last.dim for placement in outer)


@torch.no_grad()
def _gathered(tensor: Any) -> Tensor:
    import torch.distributed as dist

    local, mesh = local_part(tensor), tensor.device_mesh
    full = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    if own_copies(tensor)[0] == 0:
        for piece in own_pieces(tensor):
            full[piece.box] = piece.data
    # As integers, so that each element keeps its bits.
    bits = full.view(_BITS[full.element_size()]) if full.element_size() in _BITS else full
    for axis in range(mesh.ndim):
        dist.all_reduce(bits, group=mesh.get_group(axis))
    return full


def read_part(reader: StateReader, key: str, name: str, tensor: Any) -> Tensor:
    """Of a saved tensor, the elements that this rank holds of `tensor`, in that shape."""
    if not is_sharded(tensor):
        value: Tensor = reader.read(key, name, 0, tensor.numel())
        return value.reshape(tensor.shape)
    local, pieces = local_part(tensor), own_pieces(tensor)
    values = [reader.read_box(key, name, piece.offsets, tuple(piece.data.shape)) for piece in pieces]
    if len(values) == 1:
        only: Tensor = values[0].reshape(local.shape)
        return only
    read = torch.empty(local.shape, dtype=reader.read(key, name, 0, 0).dtype)
    for piece, value in zip(pieces, values, strict=True):
        read[piece.place] = value
    return read


@torch.no_grad()
def cut_like(tensor: Any, full: Tensor) -> Tensor:
    """`full`, of the DTensor `tensor`'s shape and the same on all ranks, cut as `tensor` is."""
    made = torch.zeros_like(tensor, dtype=full.dtype, requires_grad=False)
    copy_part(made, full)
    return made


@torch.no_grad()
def copy_part(tensor: Any, full: Tensor) -> None:
    """Fill this rank's part of a tensor from `full`, the whole one."""
    for piece in own_pieces(tensor):
        piece.data.copy_(full[piece.box])


@torch.no_grad()
def wrap_like(tensor: Any, part: Tensor) -> Tensor:
    """A tensor cut as `tensor` is, of which this rank holds a copy of `part`, in its dtype."""
    made = torch.zeros_like(tensor, dtype=part.dtype, requires_grad=False)
    local_part(made).copy_(part)
    return made
