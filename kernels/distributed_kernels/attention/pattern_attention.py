"""Attention over the pairs of a `PairPattern`: blocks on one diagonal of a window are one call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby

import torch
from torch import Tensor

from distributed_kernels.attention.block_kernels import fuses_kept_blocks
from distributed_kernels.attention.block_kernels_flex import attend
from distributed_kernels.attention.engine import Piece, draw_dropout, local, piecewise_attention
from distributed_kernels.attention.input_checks import check_attention, check_dropout, scale_of
from distributed_kernels.attention.pair_patterns import PairPattern
from distributed_kernels.attention.row_views import RowRange, RowView
from distributed_kernels.attention.tile_masks import pair_tiles
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names

_LEAST_BLOCK, _MOST_BLOCK = 16, 512
"""Rows of a block of a window: at its edges, half of a block is computed for nothing."""


@answers_foreign_names
def pattern_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: PairPattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax over the keys that `pattern` keeps, exact to the pair; memory linear in the length.

    Cost: that of the kept pairs, and of half a block at either edge of a window. On CUDA half precision takes
    one kernel. Elsewhere a window takes as many calls as it has blocks, whatever the length, and documents
    one each, equally long neighbours together.

    Args:
        q: (batch, heads, length, head_dim).
        k, v: the same; or with fewer heads, which divide those of q (grouped-query attention).
        pattern: `sliding_window(...)`, `documents(...)`, or both joined by ``&``, of q's length.
        causal: a query sees no later position.
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        dropout_p: probability with which a weight is dropped after the softmax; others are divided by 1 - p.

    Returns:
        out, shaped and typed as q.

    Raises:
        KernelError: tensors that do not agree, or a pattern of another length.
    """
    check_attention(q, k, v)
    check_dropout(dropout_p)
    if pattern.length != q.shape[2]:
        raise KernelError(
            "pattern: of another length than q",
            got=pattern.length,
            allowed=q.shape[2],
            remedy="Lengths of documents have to add up to the length of q",
        )
    kept = pattern.causal() if causal else pattern
    if not dropout_p and fuses_kept_blocks(q):
        return attend(q, k, v, pair_tiles(kept, q.device), scale_of(q, scale))[0]
    pieces = list(pattern_pieces(kept, q.device))
    return piecewise_attention(q, k, v, [local(pieces)], scale_of(q, scale), draw_dropout(dropout_p))[0]


def pattern_pieces(pattern: PairPattern, device: torch.device) -> Iterator[Piece]:
    """Dense pieces of all kept pairs, each pair in one of them."""
    starts = [0, *accumulate(pattern.lengths)]
    for length, group in groupby(zip(starts, pattern.lengths, strict=False), key=lambda pair: pair[1]):
        start, *others = (place for place, _ in group)
        before, after = (length if limit is None else limit for limit in (pattern.before, pattern.after))
        if before >= length - 1 and (after >= length - 1 or after == 0):
            rows = RowView.rows(RowRange(start, length, length, 1 + len(others)))
            yield Piece(rows, rows, causal=after < length - 1)
            continue
        for place in (start, *others):
            yield from _window(place, length, min(before, length), min(after, length), device)


def _window(start: int, length: int, before: int, after: int, device: torch.device) -> Iterator[Piece]:
    """A window over the rows [start, start + length): its diagonals of blocks, then a short last block."""
    size = min(length, max(_LEAST_BLOCK, min(_MOST_BLOCK, (before + after) // 4)))
    blocks, rest = divmod(length, size)
    end = start + blocks * size
    for step in range(-((after + size - 1) // size), (before + size - 1) // size + 1):
        segments = blocks - abs(step)
        if segments > 0:
            first, second = start + max(step, 0) * size, start + max(-step, 0) * size
            queries, keys = (RowView.rows(RowRange(x, size, size, segments)) for x in (first, second))
            yield _piece(queries, keys, _distances(size, size, step * size, device), before, after)
    if rest:
        low = max(start, end - before)
        yield _strip(end, start + length, low, start + length, before, after, device)
        if after and blocks:
            yield _strip(max(start, end - after), end, end, start + length, before, after, device)


def _strip(
    first: int, last: int, low: int, high: int, before: int, after: int, device: torch.device
) -> Piece:
    """Queries [first, last) against keys [low, high)."""
    queries, keys = (RowView.rows(RowRange(a, b - a, b - a)) for a, b in ((first, last), (low, high)))
    return _piece(queries, keys, _distances(last - first, high - low, first - low, device), before, after)


def _distances(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """Positions by which each query follows each key, the first ones being `offset` apart."""
    return torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device) + offset


def _piece(queries: RowView, keys: RowView, distance: Tensor, before: int, after: int) -> Piece:
    """The pairs whose distance is in the window; without a mask where that is all of them or a triangle."""
    rows, columns = distance.shape
    first = int(distance[0, 0])
    highest, lowest = first + rows - 1, first - columns + 1
    if highest <= before and lowest >= -after:
        return Piece(queries, keys)
    if first == 0 and rows == columns and after == 0 and highest <= before:
        return Piece(queries, keys, causal=True)
    return Piece(queries, keys, mask=(distance <= before) & (distance >= -after))
