"""Digests of parameters, by which a resumed run knows the weights that its checkpoint leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.checkpoint.dtensor import Share, is_sharded, own_copies, own_shares
from distributed.errors import UserError
from distributed.system.boxes import ranges_of

__all__ = ["add_digests", "check_omitted", "weight_digests"]

_AT_ONCE = 1 << 22
"""Elements that are converted together."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_digests(
    tensors: Mapping[str, Tensor],
    rank: int,
    size: int,
    parts: Mapping[Tensor, Any] | None = None,
    copies: Callable[[str, Tensor], tuple[int, int]] | None = None,
) -> dict[str, int]:
    """The share of one of `size` ranks in the digests of tensors, from its elements in memory.

    Args:
        tensors: name -> tensor, of those that this rank holds.
        parts: as in `export_replicated`.
        copies: as in `export_replicated`.
    """
    found: dict[str, int] = {}
    parts = parts or {}
    for name, tensor in tensors.items():
        part = parts.get(tensor)
        if part is not None:
            found[name] = _digest(part.data, part.start)
            continue
        if copies is not None:
            copy, number = copies(name, tensor)
        else:
            copy, number = own_copies(tensor) if is_sharded(tensor) else (rank, size)
        shares = own_shares(tensor, copy, number)
        found[name] = sum(_share_digest(share, tuple(tensor.shape)) for share in shares) % 2**64
    return found


def _share_digest(share: Share, shape: tuple[int, ...]) -> int:
    if not share.lengths:
        return _digest(share.data, share.start)
    runs = ranges_of(shape, share.offsets, share.lengths)
    return sum(_digest(share.data[place : place + count], start) for start, place, count in runs)


def add_digests(shares: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """The digests of whole parameters, from the shares of all ranks."""
    names = {name: None for share in shares for name in share}
    return {name: f"{sum(share.get(name, 0) for share in shares) % 2**64:016x}" for name in names}


def check_omitted(saved: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise a UserError unless the digests of a model equal those of the parameters that a checkpoint leaves
    out.

    Args:
        saved: `StateReader.omitted`.
        found: the model's own.
    """
    wrong = [name for name, digest in saved.items() if found.get(name) != digest]
    if wrong:
        more = f" and {len(wrong) - 1} more parameters" if len(wrong) > 1 else ""
        raise UserError(
            "the checkpoint leaves out frozen parameters, and this model has other values than the one that"
            f" was saved: '{wrong[0]}'{more}",
            field="model",
            got="other frozen parameters, or another dtype",
            remedy="Build the model from the pretrained weights with which the run began, or save complete"
            " checkpoints with checkpoint.trainable_only=false",
        )


@torch.no_grad()
def _digest(values: Tensor, start: int) -> int:
    """Sum over the elements of their bits times an odd number of their place, modulo 2**64: the sum of the
    pieces' digests does not depend on how the tensor is cut.

    Args:
        start: first element of `values` in the whole tensor.
    """
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat, start = torch.view_as_real(flat).reshape(-1), 2 * start
    bits, total = flat.view(_INTEGERS[flat.element_size()]), 0
    for first in range(0, len(bits), _AT_ONCE):
        part = bits[first : first + _AT_ONCE].long()
        places = torch.arange(len(part), device=part.device) + (start + first)
        total += int((part * (2 * places + 1)).sum())
    return total % 2**64
