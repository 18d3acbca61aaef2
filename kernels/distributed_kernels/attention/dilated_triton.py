"""Copies of dilated attention as Triton kernels: one launch where torch's operators need several.

The attention itself is short at a few thousand positions, and the time that the host needs to start kernels
decides. Imported when it is used; its tests run it in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from distributed_kernels.attention.dilated_tiles import Fold, Tile

_BLOCK = 4096
"""Elements of one tensor that a program copies."""
_TILE = ("first", "width", "segments", "rate", "rows", "head", "size", "step", "groups", "group_heads")
_NOT_SPECIALIZED = [*_TILE, "group_step", "total", "heads", "length"]


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    index: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    segments: tl.tensor,
    rate: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    size: tl.tensor,
    step: tl.tensor,
    groups: tl.tensor,
    group_heads: tl.tensor,
    group_step: tl.tensor,
) -> Any:
    """(sequence, head, row) of the rows `index` of a contiguous block (B, groups, size, segments, rows)."""
    kept = index % rows
    rest = index // rows
    segment = rest % segments
    rest = rest // segments
    within = rest % size
    rest = rest // size
    group = rest % groups
    own_head = head + group * group_heads + within
    row = first + group * group_step + within * step + segment * width + kept * rate
    return (rest // groups).to(tl.int64), own_head.to(tl.int64), row.to(tl.int64)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def _gather_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    block: tl.tensor,
    block_lse: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    out_batch_stride: tl.tensor,
    out_head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    total: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    segments: tl.tensor,
    rate: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    size: tl.tensor,
    step: tl.tensor,
    groups: tl.tensor,
    group_heads: tl.tensor,
    group_step: tl.tensor,
    dim: tl.tensor,
    backward: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    index = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = index < total
    batch, own, row = _place(
        index, first, width, segments, rate, rows, head, size, step, groups, group_heads, group_step
    )
    columns = tl.arange(0, block_dim)[None, :]
    seen = inside[:, None] & (columns < dim)
    source = (batch * batch_stride + own * head_stride + row * row_stride)[:, None] + columns
    long_index = index.to(tl.int64)[:, None]
    tl.store(block + long_index * dim + columns, tl.load(q + source, mask=seen), mask=seen)
    tl.store(block + (long_index + total) * dim + columns, tl.load(k + source, mask=seen), mask=seen)
    tl.store(block + (long_index + 2 * total) * dim + columns, tl.load(v + source, mask=seen), mask=seen)
    if backward:
        source = (batch * out_batch_stride + own * out_head_stride + row * out_row_stride)[:, None] + columns
        part = tl.load(out + source, mask=seen)
        tl.store(block + (long_index + 3 * total) * dim + columns, part, mask=seen)
        part = tl.load(dout + source, mask=seen)
        tl.store(block + (long_index + 4 * total) * dim + columns, part, mask=seen)
        part = tl.load(lse + (batch * heads + own) * length + row, mask=inside)
        tl.store(block_lse + index, part, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def _merge_kernel(
    mixed: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    out_lse: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    total: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    segments: tl.tensor,
    rate: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    size: tl.tensor,
    step: tl.tensor,
    groups: tl.tensor,
    group_heads: tl.tensor,
    group_step: tl.tensor,
    dim: tl.tensor,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    index = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = index < total
    batch, own, row = _place(
        index, first, width, segments, rate, rows, head, size, step, groups, group_heads, group_step
    )
    columns = tl.arange(0, block_dim)[None, :]
    seen = inside[:, None] & (columns < dim)
    place = lse + (batch * heads + own) * length + row
    before = tl.load(place, mask=inside, other=0.0)
    new = tl.load(out_lse + index, mask=inside, other=0.0)
    # `new` is finite, because a row sees at least itself; `before` is -inf where it is the first.
    share = 1.0 / (1.0 + tl.exp(before - new))
    larger = tl.maximum(before, new)
    tl.store(place, larger + tl.log(1.0 + tl.exp(tl.minimum(before, new) - larger)), mask=inside)
    target = mixed + (batch * batch_stride + own * head_stride + row * row_stride)[:, None] + columns
    part = tl.load(out + index.to(tl.int64)[:, None] * dim + columns, mask=seen, other=0.0).to(tl.float32)
    value = tl.load(target, mask=seen, other=0.0)
    tl.store(target, value + share[:, None] * (part - value), mask=seen)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def _add_kernel(
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    first_part: tl.tensor,
    second_part: tl.tensor,
    third_part: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    total: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    segments: tl.tensor,
    rate: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    size: tl.tensor,
    step: tl.tensor,
    groups: tl.tensor,
    group_heads: tl.tensor,
    group_step: tl.tensor,
    dim: tl.tensor,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    index = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    batch, own, row = _place(
        index, first, width, segments, rate, rows, head, size, step, groups, group_heads, group_step
    )
    columns = tl.arange(0, block_dim)[None, :]
    seen = (index < total)[:, None] & (columns < dim)
    target = (batch * batch_stride + own * head_stride + row * row_stride)[:, None] + columns
    source = index.to(tl.int64)[:, None] * dim + columns
    value = tl.load(dq + target, mask=seen).to(tl.float32) + tl.load(first_part + source, mask=seen)
    tl.store(dq + target, value.to(dq.dtype.element_ty), mask=seen)
    value = tl.load(dk + target, mask=seen).to(tl.float32) + tl.load(second_part + source, mask=seen)
    tl.store(dk + target, value.to(dk.dtype.element_ty), mask=seen)
    value = tl.load(dv + target, mask=seen).to(tl.float32) + tl.load(third_part + source, mask=seen)
    tl.store(dv + target, value.to(dv.dtype.element_ty), mask=seen)


def _blocks(total: int, dim: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid for `total` rows, and the sizes of a program."""
    # Not by triton.cdiv and the like, which take longer than the rest of a launch.
    block_dim = 1 << (dim - 1).bit_length()
    block_rows = max(1, _BLOCK // block_dim)
    return (-(-total // block_rows),), {"block_rows": block_rows, "block_dim": block_dim}


def gather(tile: Tile, tensors: Sequence[Tensor], lse: Tensor | None) -> tuple[list[Tensor], Fold]:
    """As `dilated_fused.gather`; q, k, v of equal strides, and out, dout of equal strides."""
    q, other = tensors[0], tensors[-1]
    batch, heads, length, dim = q.shape
    total = batch * tile.heads * tile.segments * tile.rows
    block = q.new_empty((len(tensors), total, dim))
    rows = None if lse is None else lse.new_empty(total)
    grid, sizes = _blocks(total, dim)
    unused = q
    _gather_kernel[grid](
        *tensors[:3], *(tensors[3:] or (unused, unused)), unused if lse is None else lse,
        block, unused if rows is None else rows, *q.stride()[:3], *other.stride()[:3],
        total=total, heads=heads, length=length, dim=dim, backward=lse is not None,
        **tile.launch_arguments, **sizes,
    )  # fmt: skip
    fold = Fold.contiguous(batch * tile.heads, tile.segments)
    shape = (*fold.shape(batch, tile.heads, tile.segments), tile.rows)
    found = list(block.view(len(tensors), *shape, dim).unbind(0))
    return (found if rows is None else [*found, rows.view(shape)]), fold


def merge(tile: Tile, mixed: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge (out, out_lse), contiguous blocks of `tile`, into `mixed`, (B, H, N, D) of float32, and `lse`,
    contiguous (B, H, N), whose rows that have no key are -inf."""
    total, dim = out_lse.numel(), mixed.shape[3]
    grid, sizes = _blocks(total, dim)
    _merge_kernel[grid](
        mixed, lse, out, out_lse, *mixed.stride()[:3],
        total=total, heads=mixed.shape[1], length=mixed.shape[2], dim=dim, **tile.launch_arguments, **sizes,
    )  # fmt: skip


def add(tile: Tile, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add `grads`, contiguous blocks of `tile`, to `totals`, three (B, H, N, D) of equal strides."""
    dim = totals[0].shape[3]
    total = grads[0].numel() // dim
    grid, sizes = _blocks(total, dim)
    _add_kernel[grid](
        *totals, *grads, *totals[0].stride()[:3], total=total, dim=dim, **tile.launch_arguments, **sizes
    )
