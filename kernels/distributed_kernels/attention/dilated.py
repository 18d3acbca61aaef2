"""Dilated attention as LongNet defines it (arXiv:2307.02486), exact in values and gradients.

A branch (w, r) cuts the sequence into segments of w and keeps, for head j, the positions j mod r, j mod r
+ r, ... of each; attention inside a segment is dense on what is kept. The branches' outputs are mixed by
their softmax denominators, which is one softmax over all kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distributed_kernels.attention.dilated_fused import fused_dilated_attention
from distributed_kernels.attention.dilated_tiles import HeadOffsets, check_head_offsets, dilated_plan
from distributed_kernels.attention.engine import (
    Piece,
    RingPart,
    draw_dropout,
    local,
    piecewise_attention,
    with_every_head,
)
from distributed_kernels.attention.input_checks import (
    check_attention,
    check_dropout,
    check_segments,
    scale_of,
)
from distributed_kernels.attention.ring_exchange import Ring, check_equal_slices
from distributed_kernels.attention.row_views import EVERY_HEAD, RowRange, RowView
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names


@dataclass(frozen=True)
class SlicePair:
    """Positions of the queries' and the keys' slices in a segment, their number, and the keys' block."""

    position: int = 0
    source: int = 0
    slices: int = 1
    block: int = 0


Cut = Callable[[RowView, RowView, SlicePair], Sequence[Piece]]
"""Function of kept queries, kept keys and their slice pair that returns pieces."""


@answers_foreign_names
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    first_head: int = 0,
    dropout_p: float = 0.0,
    head_offsets: str = "interleaved",
    total_heads: int = 0,
) -> Tensor:
    """softmax(q k^T scale + log C) v, C_ij the number of branches that keep both i and j in one segment.

    The last segment of a branch is shorter where its length does not divide the sequence's; nothing is
    padded. A segment length above the sequence's is the sequence's. A position that no branch keeps for a
    head gives out 0 for that head, so one rate should be 1.

    Cost: 4 length heads head_dim sum(w / r^2) FLOPs forward, half when causal; memory linear in the length.

    Args:
        q, k, v: (batch, heads, length, head_dim); with `group`, this rank's slice of the sequence. k and v
            may have fewer heads, which divide those of q; they are repeated, because each head keeps
            positions of its own.
        segment_lengths: w of each branch, in positions of the whole sequence.
        dilation_rates: r of each branch.
        causal: a query sees no later position.
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        group: the ranks that hold the sequence in equal contiguous slices, in their order. Branches whose
            segments lie within a slice stay local; of the others, only the kept keys and values travel.
        first_head: number of the first of these heads where they are a part of more (`ulysses_attention`).
        dropout_p: probability with which a weight of a branch is dropped after the softmax; others are
            divided by 1 - p. Masks are drawn from torch's global generator. 0.0 in evaluation.
        head_offsets: first position that head j keeps of a segment: ``interleaved``, j mod r, as in LongNet's
            paper; or ``grouped``, j // (heads / r) rounded up, as in torchscale.
        total_heads: number of all heads where these are a part of more; ``grouped`` depends on it. 0 when
            these are all.

    Returns:
        out, shaped and typed as q.

    Raises:
        KernelError: tensors, lists or ranks that do not agree; or, with `group`, a segment length that is
            neither a divisor nor a multiple of the slice.
    """
    check_attention(q, k, v)
    check_dropout(dropout_p)
    check_segments(segment_lengths, dilation_rates)
    check_head_offsets(head_offsets)
    k, v = with_every_head(q, k, v)
    pairs = tuple(zip(segment_lengths, dilation_rates, strict=True))
    heads = (first_head, head_offsets, total_heads)
    if not dropout_p and q.numel() and _stays(q, pairs, group):
        plan = dilated_plan(pairs, q.shape[2], q.shape[1], HeadOffsets(head_offsets, first_head, total_heads))
        return fused_dilated_attention(q, k, v, plan, causal, scale_of(q, scale))

    def whole(queries: RowView, keys: RowView, slice_pair: SlicePair) -> list[Piece]:
        if causal and slice_pair.source > slice_pair.position:
            return []
        return [Piece(queries, keys, causal and slice_pair.source == slice_pair.position, slice_pair.block)]

    branches = dilated_branches(q, pairs, whole, group, *heads)
    return piecewise_attention(q, k, v, branches, scale_of(q, scale), draw_dropout(dropout_p, group))[0]


def _stays(q: Tensor, pairs: Sequence[tuple[int, int]], group: ProcessGroup | None) -> bool:
    """Whether every segment lies on this rank, which is the same on all ranks of `group`."""
    if group is None or group.size() == 1:
        return True
    if any(q.shape[2] % width for width, _ in pairs):
        return False
    check_equal_slices(q, group)
    return True


def dilated_branches(
    q: Tensor,
    pairs: Sequence[tuple[int, int]],
    cut: Cut,
    group: ProcessGroup | None,
    first_head: int = 0,
    head_offsets: str = "interleaved",
    total_heads: int = 0,
) -> list[RingPart]:
    """One branch for each (segment length, rate): local, or round the ranks that a segment spans.

    Raises:
        KernelError: a segment length that is neither a divisor nor a multiple of the slice.
    """
    offsets = HeadOffsets(head_offsets, first_head, total_heads)
    if group is None or group.size() == 1:
        return [_local_part(q, width, rate, cut, offsets) for width, rate in pairs]
    check_equal_slices(q, group)
    return [_branch_across(q, width, rate, cut, group, offsets) for width, rate in pairs]


def _local_part(q: Tensor, width: int, rate: int, cut: Cut, offsets: HeadOffsets) -> RingPart:
    heads, length = q.shape[1:3]
    row_views = _segment_views(length, heads, min(width, length), rate, offsets) if length else ()
    return local([piece for row_view in row_views for piece in cut(row_view, row_view, SlicePair())])


def _segment_views(length: int, heads: int, width: int, rate: int, offsets: HeadOffsets) -> Iterator[RowView]:
    whole, rest = divmod(length, width)
    yield from _equal_views(_kept(0, width, whole, heads, rate, offsets))
    if rest:
        yield from _equal_views(_kept(length - rest, rest, 1, heads, rate, offsets))


def _kept(
    start: int, width: int, segments: int, heads: int, rate: int, offsets: HeadOffsets, shift: int = 0
) -> list[tuple[slice, tuple[RowRange, ...]]]:
    """Rows that heads of equal offsets keep of the segments from row `start` on; may be empty. `shift`: rows
    by which segments begin before them."""
    groups: list[tuple[slice, tuple[RowRange, ...]]] = []
    for chosen, first in offsets.groups(heads, rate):
        offset = (first - shift) % rate
        row_range = RowRange(
            start, width, len(range(offset, width, rate)), segments, min(offset, width - 1), rate
        )
        groups.append((EVERY_HEAD if rate == 1 else chosen, (row_range,)))
    return groups


def _equal_views(groups: list[tuple[slice, tuple[RowRange, ...]]]) -> Iterator[RowView]:
    """One row view per number of kept rows, which differs by one where the rate divides no segment."""

    def rows(group: tuple[slice, tuple[RowRange, ...]]) -> int:
        return group[1][0].length

    for kept, equal in groupby(sorted(groups, key=rows, reverse=True), key=rows):
        if kept:
            yield RowView(tuple(equal))


def _branch_across(
    q: Tensor, width: int, rate: int, cut: Cut, group: ProcessGroup, offsets: HeadOffsets
) -> RingPart:
    length, ranks, rank = q.shape[2], group.size(), dist.get_rank(group)
    width = min(width, length * ranks)
    if length % width == 0:
        return _local_part(q, width, rate, cut, offsets)
    if width % length:
        raise KernelError(
            f"segment_lengths: {width} neither divides nor is a multiple of a rank's slice of {length}",
            got=width,
            allowed=f"divisors of {length}, or multiples of it",
            remedy=f"Change the segment length, or the {ranks} slices of {length}",
        )
    span = width // length
    first = rank // span * span
    ring = Ring.of(group, range(first, min(first + span, ranks)))
    if ring.size == 1:
        # What is left of the sequence for the last segment is this one slice.
        return _local_part(q, length, rate, cut, offsets)
    return _travelling_part(length, q.shape[1], rate, cut, ring, offsets)


def _travelling_part(
    length: int, heads: int, rate: int, cut: Cut, ring: Ring, offsets: HeadOffsets
) -> RingPart:
    """A branch whose segment spans the ring's slices: the kept rows of each travel.

    All heads in one block where the rate divides the slice, so that all keep equally many rows; else the
    heads of each residue in a block of their own.
    """

    def row_views(source: int) -> list[RowView]:
        # The segment began `source` slices before this row 0.
        groups = _kept(0, length, 1, heads, rate, offsets, source * length)
        return [RowView(tuple(groups))] if length % rate == 0 else [RowView((group,)) for group in groups]

    def pieces(source: int) -> list[Piece]:
        found: list[Piece] = []
        for block, (own, theirs) in enumerate(zip(row_views(ring.position), row_views(source), strict=True)):
            slice_pair = SlicePair(ring.position, source, ring.size, block)
            if own.length and theirs.length:
                found += cut(own, RowView.all(theirs.length), slice_pair)
        return found

    everyone = range(ring.size)
    return RingPart([pieces(each) for each in everyone], ring, [row_views(each) for each in everyone])
