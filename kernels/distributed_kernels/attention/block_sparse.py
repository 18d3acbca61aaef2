"""Block-sparse attention: one softmax over the keys of all blocks that a mask keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distributed_kernels.attention.block_kernels import fuses_kept_blocks
from distributed_kernels.attention.block_kernels_flex import attend
from distributed_kernels.attention.engine import (
    Piece,
    RingPart,
    draw_dropout,
    local,
    piecewise_attention,
    with_every_head,
)
from distributed_kernels.attention.input_checks import check_attention, check_dropout, scale_of
from distributed_kernels.attention.patterns import KeptBlocks, block_pattern
from distributed_kernels.attention.ring_exchange import Ring, check_equal_slices
from distributed_kernels.attention.row_views import EVERY_HEAD, RowView
from distributed_kernels.attention.tile_masks import mask_tiles, pattern_tiles
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names


@answers_foreign_names
def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: str = "local",
    block_size: int = 64,
    sparsity_ratio: float = 0.1,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    group: ProcessGroup | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax over the keys of the kept blocks; causal cuts only the blocks on the diagonal by a triangle.

    Cost: that of dense attention times the share of blocks kept; memory linear in the length.

    Args:
        q, k, v: (batch, heads, length, head_dim); with `group`, this rank's slice of the sequence. k and v
            may have fewer heads, which divide those of q; they are repeated for a mask of each head.
        pattern: which blocks to keep (`block_pattern`); not read when `mask` is given.
        block_size: positions of a block; the last one of the sequence may be short.
        sparsity_ratio: share of blocks to keep; not read when `mask` is given.
        causal: a query sees no later position; blocks of `mask` above the diagonal are not kept.
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        mask: bool (blocks, blocks) or (heads, blocks, blocks), queries by keys of the whole sequence, True
            where a block is kept. A query of whose blocks none is kept gives out 0.
        group: the ranks that hold the sequence in equal contiguous slices, each a multiple of the block
            size; keys and values go round them, and blocks that are not kept cost nothing.
        dropout_p: probability with which a weight is dropped after the softmax; others are divided by 1 - p.
            Masks are drawn from torch's global generator. 0.0 in evaluation.

    Returns:
        out, shaped and typed as q.

    Raises:
        KernelError: tensors or ranks that do not agree, an unknown pattern, a mask of another shape.
    """
    check_attention(q, k, v)
    check_dropout(dropout_p)
    heads, length = q.shape[1:3]
    ranks = 1 if group is None else group.size()
    if mask is not None:
        _check_mask(mask, heads, length * ranks, block_size)
    fused = not dropout_p and fuses_kept_blocks(q)
    if fused and ranks == 1:
        tiles = (
            pattern_tiles(pattern, length, block_size, sparsity_ratio, causal, q.device)
            if mask is None
            else mask_tiles(mask, length, block_size, causal, q.device)
        )
        return attend(q, k, v, tiles, scale_of(q, scale))[0]
    if mask is None:
        mask = block_pattern(
            pattern, length * ranks, block_size=block_size, sparsity_ratio=sparsity_ratio, causal=causal
        )
    if mask.dim() == 3:
        k, v = with_every_head(q, k, v)
    if group is None or ranks == 1:
        row_view = RowView.all(length)
        branch = local(list(masked_pieces(row_view, row_view, mask, block_size, causal)))
    else:
        check_equal_slices(q, group)
        # Dense pieces are cut by the host, which reads the mask; the kernel reads it on the device.
        cut, place = (_kept_pieces, q.device) if fused else (_dense_pieces, torch.device("cpu"))
        branch = _ring_branch(length, KeptBlocks(mask.to(place), block_size, causal), group, cut)
    return piecewise_attention(q, k, v, [branch], scale_of(q, scale), draw_dropout(dropout_p, group))[0]


def _dense_pieces(row_view: RowView, kept: KeptBlocks) -> list[Piece]:
    """One piece for each dense block of the slice."""
    return list(masked_pieces(row_view, row_view, *kept))


def _kept_pieces(row_view: RowView, kept: KeptBlocks) -> list[Piece]:
    """The whole slice for a kernel that skips the blocks that are not kept."""
    return [Piece(row_view, row_view, kept=kept)]


def _ring_branch(
    length: int, kept: KeptBlocks, group: ProcessGroup, cut: Callable[[RowView, KeptBlocks], list[Piece]]
) -> RingPart:
    mask, block_size, causal = kept
    if length % block_size:
        raise KernelError(
            f"block_size: {block_size} does not divide a rank's slice of {length}",
            got=block_size,
            allowed=f"divisors of {length}",
            remedy="Choose slices of whole blocks",
        )
    ring, blocks = Ring.of(group), length // block_size
    rank = ring.position
    row_view, rows = RowView.all(length), mask[..., rank * blocks : (rank + 1) * blocks, :]

    def pieces(source: int) -> list[Piece]:
        if causal and source > rank:
            return []
        part = rows[..., source * blocks : (source + 1) * blocks]
        return cut(row_view, KeptBlocks(part, block_size, causal and source == rank))

    return RingPart([pieces(source) for source in range(ring.size)], ring)


def masked_pieces(
    queries: RowView, keys: RowView, mask: Tensor, block_size: int, causal: bool, block: int = 0
) -> Iterator[Piece]:
    """The kept blocks of `queries` against `keys`, both cut into blocks of `block_size` rows.

    Args:
        queries, keys: row views, each of whose groups is one row range.
        mask: bool (query blocks, key blocks) or (heads, query blocks, key blocks); one for each head only
            with row views of one group.
        block_size: rows of a block.
        causal: the diagonal is that of the sequence: blocks on it are cut by a triangle.
        block: index of the ring part's block with the rows of `keys`.
    """
    for heads, rows in _by_heads(mask.cpu()):
        diagonal = [causal and place < len(row) and row[place] for place, row in enumerate(rows)]
        kept = [
            tuple(j for j, keep in enumerate(row) if keep and not (causal and j >= i))
            for i, row in enumerate(rows)
        ]
        for key_blocks, places in _equal_rows(kept):
            yield Piece(
                queries.parts(_ranges(places, block_size, queries.length), heads),
                keys.parts(_ranges(key_blocks, block_size, keys.length), heads),
                block=block,
            )
        for place, on in enumerate(diagonal):
            if on:
                ranges = _ranges([place], block_size, queries.length)
                yield Piece(queries.parts(ranges, heads), keys.parts(ranges, heads), True, block)


def _by_heads(mask: Tensor) -> Iterator[tuple[slice, list[list[bool]]]]:
    """(heads, rows): all heads at once, or runs of neighbouring heads with equal masks."""
    if mask.dim() == 2:
        yield EVERY_HEAD, mask.tolist()
        return
    for rows, group in groupby(enumerate(mask.tolist()), key=lambda pair: pair[1]):
        places = [place for place, _ in group]
        yield slice(places[0], places[-1] + 1), rows


def _equal_rows(kept: Sequence[tuple[int, ...]]) -> Iterable[tuple[tuple[int, ...], list[int]]]:
    """Query blocks that keep the same key blocks, together: one dense block for all of them."""
    together: dict[tuple[int, ...], list[int]] = {}
    for place, key_blocks in enumerate(kept):
        if key_blocks:
            together.setdefault(key_blocks, []).append(place)
    return together.items()


def _ranges(blocks: Sequence[int], block_size: int, length: int) -> list[tuple[int, int]]:
    """Rows [first, end) of the blocks, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for place in blocks:
        first, end = place * block_size, min((place + 1) * block_size, length)
        if ranges and ranges[-1][1] == first:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((first, end))
    return ranges


def _check_mask(mask: Tensor, heads: int, length: int, block_size: int) -> None:
    blocks = -(-length // block_size)
    allowed = f"({blocks}, {blocks}) or ({heads}, {blocks}, {blocks})"
    if tuple(mask.shape) not in ((blocks, blocks), (heads, blocks, blocks)):
        raise KernelError(
            f"mask: needs one entry for each block of {block_size} of {length} positions",
            got=tuple(mask.shape),
            allowed=allowed,
            remedy="The last block may be short, but counts as one",
        )
    if mask.dtype != torch.bool:
        raise KernelError(
            "mask: must be boolean", got=mask.dtype, allowed="torch.bool", remedy="Give mask != 0"
        )
