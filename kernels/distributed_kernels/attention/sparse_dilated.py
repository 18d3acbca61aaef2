"""Dilated attention of which, inside every segment, only some blocks are kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from distributed_kernels.attention.block_sparse import masked_pieces
from distributed_kernels.attention.dilated import SlicePair, dilated_branches
from distributed_kernels.attention.dilated_tiles import check_head_offsets
from distributed_kernels.attention.engine import Piece, draw_dropout, piecewise_attention, with_every_head
from distributed_kernels.attention.input_checks import (
    check_attention,
    check_dropout,
    check_segments,
    scale_of,
)
from distributed_kernels.attention.patterns import block_pattern
from distributed_kernels.attention.row_views import RowView
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names


@answers_foreign_names
def block_sparse_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    pattern: str = "local",
    block_size: int = 64,
    sparsity_ratio: float = 0.1,
    causal: bool = False,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    first_head: int = 0,
    dropout_p: float = 0.0,
    head_offsets: str = "interleaved",
    total_heads: int = 0,
) -> Tensor:
    """One softmax over the pairs of all dilated branches that lie in kept blocks of their segment.

    A segment of w positions keeps w/r rows for a head; these are cut into blocks, and the pattern
    selects which blocks see which. With one branch (length, 1) it is `block_sparse_attention`, with a ratio
    of 1 `dilated_attention`.

    Args:
        q, k, v, segment_lengths, dilation_rates, causal, scale, group, first_head, dropout_p, head_offsets,
            total_heads: as for `dilated_attention`.
        pattern, block_size, sparsity_ratio: as for `block_pattern`, with the rows that a segment keeps as
            the length.

    Returns:
        out, shaped and typed as q.

    Raises:
        KernelError: as `dilated_attention` and `block_pattern`; or, where a segment spans ranks, a block
            size that does not divide the rows that a slice keeps.
    """
    check_attention(q, k, v)
    check_dropout(dropout_p)
    check_segments(segment_lengths, dilation_rates)
    check_head_offsets(head_offsets)
    k, v = with_every_head(q, k, v)

    def cut(queries: RowView, keys: RowView, slice_pair: SlicePair) -> list[Piece]:
        if causal and slice_pair.source > slice_pair.position:
            return []
        rows, slices = queries.length, slice_pair.slices
        if slices > 1:
            _check_slices(rows, block_size, q.shape[2], dilation_rates)
        mask = block_pattern(
            pattern, rows * slices, block_size=block_size, sparsity_ratio=sparsity_ratio, causal=causal
        )
        if slices > 1:
            own, theirs = (
                _blocks_of(place, rows, block_size) for place in (slice_pair.position, slice_pair.source)
            )
            mask = mask[own, theirs]
        diagonal = causal and slice_pair.source == slice_pair.position
        return list(masked_pieces(queries, keys, mask, block_size, diagonal, slice_pair.block))

    pairs = list(zip(segment_lengths, dilation_rates, strict=True))
    branches = dilated_branches(q, pairs, cut, group, first_head, head_offsets, total_heads)
    return piecewise_attention(q, k, v, branches, scale_of(q, scale), draw_dropout(dropout_p, group))[0]


def _blocks_of(place: int, rows: int, block_size: int) -> slice:
    blocks = rows // block_size
    return slice(place * blocks, (place + 1) * blocks)


def _check_slices(rows: int, block_size: int, length: int, rates: Sequence[int]) -> None:
    # Where a rate does not divide the slice, ranks keep unequally many rows, and no block size fits all.
    uneven = [rate for rate in rates if length % rate]
    if uneven:
        raise KernelError(
            f"dilation_rates: {uneven[0]} does not divide a rank's slice of {length}",
            got=list(rates),
            allowed=f"divisors of {length}",
            remedy="With a block pattern across ranks, every slice must keep equally many rows",
        )
    if rows % block_size:
        raise KernelError(
            f"block_size: {block_size} does not divide the {rows} rows that a slice keeps",
            got=block_size,
            allowed=f"divisors of {rows}",
            remedy="Choose slices that keep whole blocks",
        )
