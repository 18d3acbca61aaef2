"""Dilated attention as LongNet defines it (arXiv:2307.02486), exact in values and gradients.

A branch (w, r) cuts the sequence into segments of w and keeps, for head j, the positions j mod r, j mod r
+ r, ... of each; attention inside a segment is dense on what is kept. The branches' outputs are mixed by
their softmax denominators, which is one softmax over all kept keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distributed_kernels.checks import check_attention, check_segments, scale_of
from distributed_kernels.comm import Ring, check_equal_slices
from distributed_kernels.errors import KernelError
from distributed_kernels.pieces import Branch, Piece, local, piecewise_attention
from distributed_kernels.takes import Run, Take

__all__ = ["dilated_attention", "dilated_takes"]


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
) -> Tensor:
    """softmax(q k^T scale + log C) v, C_ij the number of branches that keep both i and j in one segment.

    The last segment of a branch is shorter where its length does not divide the sequence's; nothing is
    padded. A segment length above the sequence's is the sequence's. A position that no branch keeps for a
    head gives out 0 for that head, so one rate should be 1.

    Cost: 4 length heads head_dim sum(w / r^2) multiply-adds forward, half when causal; memory linear.

    Args:
        q, k, v: (batch, heads, length, head_dim); with `group`, this rank's slice of the sequence.
        segment_lengths: w of each branch, in positions of the whole sequence.
        dilation_rates: r of each branch.
        causal: a query sees no later position.
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        group: the ranks that hold the sequence in equal contiguous slices, in their order. Branches whose
            segments lie within a slice stay local; of the others, only the kept keys and values travel.
        first_head: number of the first of these heads where they are a part of more (`ulysses_attention`).

    Returns:
        out, shaped and typed as q.

    Raises:
        KernelError: tensors, lists or ranks that do not agree; or, with `group`, a segment length that is
            neither a divisor nor a multiple of the slice.
    """
    check_attention(q, k, v)
    check_segments(segment_lengths, dilation_rates)
    heads, length = q.shape[1:3]
    pairs = list(zip(segment_lengths, dilation_rates, strict=True))
    if group is None or group.size() == 1:
        branches = [local(list(_local_pieces(length, heads, w, r, causal, first_head))) for w, r in pairs]
    else:
        check_equal_slices(q, group)
        branches = [_branch_across(length, heads, w, r, causal, first_head, group) for w, r in pairs]
    return piecewise_attention(q, k, v, branches, scale_of(q, scale))[0]


def dilated_takes(
    heads: int, start: int, width: int, segments: int, rate: int, first_head: int
) -> list[Take]:
    """What a branch keeps of `segments` segments of `width` positions from row `start` on.

    One take for each number of kept rows: heads whose first row comes late in a segment that the rate does
    not divide have one row less. Heads that keep nothing are in none.
    """
    groups = []
    for residue in range(min(rate, heads)):
        offset = (residue + first_head) % rate
        if kept := len(range(offset, width, rate)):
            run = Run(start, width, kept, segments, offset, rate)
            groups.append((slice(residue, None, rate), (run,)))
    if rate == 1:
        return [Take.rows(run) for _, (run,) in groups]

    def rows(group: tuple[slice, tuple[Run, ...]]) -> int:
        return group[1][0].length

    return [Take(tuple(equal)) for _, equal in groupby(sorted(groups, key=rows, reverse=True), key=rows)]


def _segment_takes(length: int, heads: int, width: int, rate: int, first_head: int) -> Iterator[Take]:
    width = min(width, length)
    whole, rest = divmod(length, width)
    yield from dilated_takes(heads, 0, width, whole, rate, first_head)
    if rest:
        yield from dilated_takes(heads, length - rest, rest, 1, rate, first_head)


def _local_pieces(
    length: int, heads: int, width: int, rate: int, causal: bool, first_head: int
) -> Iterator[Piece]:
    if length == 0:
        return
    for take in _segment_takes(length, heads, width, rate, first_head):
        yield Piece(take, take, causal)


def _branch_across(
    length: int, heads: int, width: int, rate: int, causal: bool, first_head: int, group: ProcessGroup
) -> Branch:
    ranks, rank = group.size(), dist.get_rank(group)
    width = min(width, length * ranks)
    if length % width == 0:
        return local(list(_local_pieces(length, heads, width, rate, causal, first_head)))
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
    return _travelling_branch(length, heads, rate, causal, first_head, ring)


def _travelling_branch(
    length: int, heads: int, rate: int, causal: bool, first_head: int, ring: Ring
) -> Branch:
    """A branch whose segment is the ring's slices: each position's kept rows travel."""

    def takes(source: int) -> list[Take | None]:
        # The segment began `source` slices before this row 0.
        shift = (first_head - source * length) % rate
        return [*dilated_takes_by_head(length, heads, rate, shift)]

    def pieces(source: int) -> list[Piece]:
        if causal and source > ring.position:
            return []
        own, theirs = takes(ring.position), takes(source)
        return [
            Piece(mine, Take.all(keys.length), causal and source == ring.position, block)
            for block, (mine, keys) in enumerate(zip(own, theirs, strict=True))
            if mine is not None and keys is not None and mine.length and keys.length
        ]

    return Branch(pieces, takes, ring)


def dilated_takes_by_head(length: int, heads: int, rate: int, first_head: int) -> list[Take]:
    """What a slice keeps of a segment, in takes whose heads are the same on every rank.

    One take of all heads where the rate divides the slice, so that all keep equally many; else one for
    each residue, possibly of no rows.
    """
    groups = []
    for residue in range(min(rate, heads)):
        offset = (residue + first_head) % rate
        run = Run(0, length, len(range(offset, length, rate)), 1, min(offset, length - 1), rate)
        groups.append((slice(residue, None, rate), (run,)))
    return [Take(tuple(groups))] if length % rate == 0 else [Take((group,)) for group in groups]
