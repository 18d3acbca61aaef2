"""The engine of every attention in this package: one softmax over (query, key) pairs given in pieces.

A piece is a dense block of pairs. A pair that lies in several pieces counts several times. Forward, the
pieces' (out, lse) are merged as they come. Backward, each piece's gradients follow from the *whole*
softmax's (out, lse) and are added up. What is kept between the two is q, k, v, out and lse: memory is
linear in the sequence, whatever the pieces.

Across ranks, keys and values travel round a ring (Ring Attention, arXiv:2310.01889), and in the backward
their gradients travel with them and are back after as many hops as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from distributed_kernels.attention.block_kernels import block_backward, block_forward, chosen_blocks
from distributed_kernels.attention.block_kernels_reference import accumulator
from distributed_kernels.attention.patterns import KeptBlocks
from distributed_kernels.attention.ring_exchange import Ring
from distributed_kernels.attention.row_views import RowView


@dataclass(frozen=True)
class Piece:
    """Every query of `queries` against every key of `keys` in the same segment and head.

    Attributes:
        queries: rows of this rank's q.
        keys: rows of the travelling block, or of this rank's k and v.
        causal: row i of a segment's queries sees keys 0..i; then there are as many keys as queries.
        block: index of the ring part's block with the rows of `keys`.
        mask: bool, broadcastable to (batch, heads, queries, keys), True where a key may be seen; only
            for row views of one segment.
        kept: blocks of (queries, keys) that are seen, in place of `causal` and `mask`; only for row views of
            one segment.
    """

    queries: RowView
    keys: RowView
    causal: bool = False
    block: int = 0
    mask: Tensor | None = None
    kept: KeptBlocks | None = None


@dataclass(frozen=True)
class RingPart:
    """Pieces whose keys are on the ranks of one ring.

    Everything is computed before the first message, so that an error is raised while no rank waits.

    Attributes:
        pieces: pieces over the keys of each position in the ring.
        ring: ring of ranks; by default only this rank.
        blocks: row views of each position's k and v that travel; None for all of k and v
            as they are, as it must be in a ring of one, where nothing travels.
    """

    pieces: Sequence[Sequence[Piece]]
    ring: Ring = field(default_factory=Ring)
    blocks: Sequence[Sequence[RowView]] | None = None

    def row_views(self, source: int, x: Tensor) -> Sequence[RowView]:
        """Row views of `x` that travel from the rank at `source`."""
        return (RowView.all(x.shape[2]),) if self.blocks is None else self.blocks[source % self.ring.size]

    def gather(self, x: Tensor) -> list[Tensor]:
        """This rank's blocks of `x`, each (B, heads, rows, D)."""
        return [row_view.gather(x).squeeze(2) for row_view in self.row_views(self.ring.position, x)]

    def add_to(self, x: Tensor, blocks: Sequence[Tensor]) -> None:
        """Add what `gather` would have made to the rows it comes from."""
        for row_view, block in zip(self.row_views(self.ring.position, x), blocks, strict=True):
            row_view.add_to(x, block.unsqueeze(2))

    def shapes(self, source: int, x: Tensor) -> list[tuple[int, ...]]:
        """Shapes of the blocks that the rank at `source` gathers, whose tensors are shaped as `x`."""
        shapes = [row_view.shape(x) for row_view in self.row_views(source, x)]
        return [(*shape[:2], *shape[3:]) for shape in shapes]


def local(pieces: Sequence[Piece]) -> RingPart:
    """A ring part whose keys are all on this rank."""
    return RingPart([pieces])


class Dropout(NamedTuple):
    """Dropout of attention weights, whose masks are drawn again for the backward and never kept.

    Attributes:
        p: probability with which a weight is dropped.
        seed: of the masks.
    """

    p: float
    seed: int

    def factors(self, queries: Tensor, keys: Tensor, place: Sequence[int]) -> Tensor:
        """(b, h, queries, keys): 0 or 1 / (1 - p), independent for each `place` of a block."""
        digest = blake2b(repr((self.seed, *place)).encode(), digest_size=8).digest()
        generator = torch.Generator(queries.device).manual_seed(int.from_bytes(digest, "big") >> 1)
        drawn = torch.rand(
            (*queries.shape[:3], keys.shape[2]),
            generator=generator,
            device=queries.device,
            dtype=accumulator(queries.dtype),
        )
        return (drawn >= self.p) / (1.0 - self.p)


def draw_dropout(p: float, group: ProcessGroup | None = None) -> Dropout | None:
    """Dropout with a seed from torch's global generator of the CPU, of its own on each rank of `group`; None
    for a `p` of 0."""
    if not p:
        return None
    drawn = int(torch.randint(2**31, ()))
    rank = 0 if group is None else dist.get_rank(group)
    return Dropout(p, drawn * group.size() + rank if group is not None else drawn)


def _fold(block: Tensor) -> Tensor:
    """(B, h, S, m, ...) -> four dimensions as the kernels want them, a view where strides allow."""
    return block.squeeze(2) if block.shape[2] == 1 else block.flatten(0, 1)


class _Sum:
    """A sum over blocks, kept in the accumulator's dtype; the first block that covers all is taken over."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._dtype = like, accumulator(like.dtype)
        self._total: Tensor | None = None

    def add(self, row_view: RowView, block: Tensor) -> None:
        if self._total is None and row_view.covers(self._like.shape[2]):
            self._total = block.reshape(self._like.shape).to(self._dtype)
        else:
            row_view.add_to(self.total, block.reshape(row_view.shape(self.total)))

    @property
    def total(self) -> Tensor:
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=self._dtype)
        return self._total


class _Softmax:
    """The (out, lse) of the pieces merged so far."""

    def __init__(self, q: Tensor) -> None:
        self._q, self._dtype = q, accumulator(q.dtype)
        self._state: tuple[Tensor, Tensor] | None = None

    def merge(self, row_view: RowView, out: Tensor, lse: Tensor) -> None:
        shape = self._q.shape
        if self._state is None and row_view.covers(shape[2]):
            self._state = out.reshape(shape).to(self._dtype), lse.reshape(shape[:3])
            return
        total, total_lse = self.state
        out, lse = out.reshape(row_view.shape(total)), lse.reshape(row_view.shape(total_lse))
        pairs = zip(row_view.matched(total, out), row_view.matched(total_lse, lse), strict=True)
        for (part, rows), (part_lse, rows_lse) in pairs:
            _merge_rows(rows, rows_lse, part, part_lse)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        if self._state is None:
            shape, dtype = self._q.shape, self._dtype
            lse = self._q.new_full(shape[:3], -torch.inf, dtype=dtype)
            self._state = self._q.new_zeros(shape, dtype=dtype), lse
        return self._state


def _merge_rows(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge into (out, lse) in place. Where neither has a key, -inf minus -inf must not come out."""
    share = torch.sigmoid(new_lse - lse).masked_fill(new_lse == -torch.inf, 0.0)
    out.lerp_(new_out.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def _shared(block: Tensor, heads: int) -> Tensor:
    """(B, h, S, m, D) -> (B, heads, S, m, D): a block of keys or values for each head of queries."""
    return block if block.shape[1] == heads else block.repeat_interleave(heads // block.shape[1], 1)


def _added(block: Tensor, like: Tensor, heads: int) -> Tensor:
    """Undo `_shared` for a gradient: (B, heads, S, m, D) folded -> shaped as `like`, summed over the heads
    that share one of its own."""
    batch, shared, segments, rows, width = like.shape
    if shared == heads:
        return block
    return block.reshape(batch, shared, heads // shared, segments, rows, width).sum(2)


@dataclass(frozen=True)
class _How:
    """What all pieces of one attention have in common.

    Attributes:
        scale: factor on the scores.
        blocks: implementation of the blocks.
        dropout: of the weights; None without.
    """

    scale: float
    blocks: str
    dropout: Dropout | None = None

    def factors(self, queries: Tensor, keys: Tensor, place: Sequence[int]) -> Tensor | None:
        """Factors of the weights of the block at `place`: (branch, source, piece)."""
        return None if self.dropout is None else self.dropout.factors(queries, keys, place)


def _forward_piece(
    piece: Piece, place: Sequence[int], q: Tensor, k: Tensor, v: Tensor, softmax: _Softmax, how: _How
) -> None:
    gathered = piece.queries.gather(q)
    heads = gathered.shape[1]
    queries = _fold(gathered)
    keys, values = (_fold(_shared(piece.keys.gather(x), heads)) for x in (k, v))
    factors = how.factors(queries, keys, place)
    out, lse = block_forward(
        *(queries, keys, values, piece.causal, how.scale),
        mask=piece.mask,
        factors=factors,
        kept=piece.kept,
        blocks=how.blocks,
    )
    softmax.merge(piece.queries, out, lse)


def _forward_branch(
    number: int, branch: RingPart, qkv: Sequence[Tensor], softmax: _Softmax, how: _How
) -> None:
    q, k, v = qkv
    ring = branch.ring
    travelling = branch.gather(k) + branch.gather(v)
    for hop in range(ring.size):
        source = (ring.position - hop) % ring.size
        last = hop + 1 == ring.size
        shift = None if last else ring.shift(travelling, branch.shapes(source - 1, k) * 2)
        half = len(travelling) // 2
        for index, piece in enumerate(branch.pieces[source]):
            keys, values = travelling[piece.block], travelling[half + piece.block]
            _forward_piece(piece, (number, source, index), q, keys, values, softmax, how)
        travelling = travelling if shift is None else shift.wait()


@dataclass
class _Whole:
    """Inputs of a piece's backward from the whole softmax, and the sum for its dq."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dq: _Sum
    how: _How


def _backward_piece(
    piece: Piece, place: Sequence[int], whole: _Whole, k: Tensor, v: Tensor, dk: _Sum, dv: _Sum
) -> None:
    gathered = [piece.queries.gather(x) for x in (whole.dout, whole.q, whole.out, whole.lse)]
    heads, (dout, q, out, lse) = gathered[0].shape[1], (_fold(x) for x in gathered)
    own = [piece.keys.gather(x) for x in (k, v)]
    keys, values = (_fold(_shared(x, heads)) for x in own)
    how = whole.how
    factors = how.factors(q, keys, place)
    grads = block_backward(
        *(dout, q, keys, values, out, lse, piece.causal, how.scale),
        mask=piece.mask,
        factors=factors,
        kept=piece.kept,
        blocks=how.blocks,
    )
    whole.dq.add(piece.queries, grads[0])
    dk.add(piece.keys, _added(grads[1], own[0], heads))
    dv.add(piece.keys, _added(grads[2], own[1], heads))


def _backward_branch(
    number: int, branch: RingPart, whole: _Whole, k: Tensor, v: Tensor, dk: _Sum, dv: _Sum
) -> None:
    if branch.ring.size == 1:
        # Nothing travels: gradients go straight into the totals.
        for index, piece in enumerate(branch.pieces[0]):
            _backward_piece(piece, (number, 0, index), whole, k, v, dk, dv)
        return
    home = _ring_gradients(number, branch, whole, k, v)
    half = len(home) // 2
    branch.add_to(dk.total, home[:half])
    branch.add_to(dv.total, home[half:])


def _ring_gradients(number: int, branch: RingPart, whole: _Whole, k: Tensor, v: Tensor) -> list[Tensor]:
    """Gradients of this rank's blocks of k and v, after they went round."""
    ring = branch.ring
    travelling, arriving_sums = branch.gather(k) + branch.gather(v), None
    for hop in range(ring.size):
        source = (ring.position - hop) % ring.size
        shapes = branch.shapes(source - 1, k) * 2
        shift = ring.shift(travelling, shapes) if hop + 1 < ring.size else None
        sums = [_Sum(x) for x in travelling]
        half = len(travelling) // 2
        for index, piece in enumerate(branch.pieces[source]):
            first, second, place = piece.block, half + piece.block, (number, source, index)
            keys, values = travelling[first], travelling[second]
            _backward_piece(piece, place, whole, keys, values, sums[first], sums[second])
        totals = [each.total for each in sums]
        if arriving_sums is not None:
            totals = [own + earlier for own, earlier in zip(totals, arriving_sums.wait(), strict=True)]
        travelling = travelling if shift is None else shift.wait()
        arriving_sums = ring.shift(totals, shapes)
    return arriving_sums.wait() if arriving_sums is not None else []


class _PiecewiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        branches: Sequence[RingPart],
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.branches, ctx.how = branches, _How(scale, chosen_blocks(q), dropout)
        softmax = _Softmax(q)
        with torch.autocast(q.device.type, enabled=False):
            for number, branch in enumerate(branches):
                _forward_branch(number, branch, (q, k, v), softmax, ctx.how)
        out, lse = softmax.state
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        width, dead = q.shape[-1], lse == -torch.inf
        if dlse is not None:
            q, k, v, out, dout = _with_lse_gradient(q, k, v, out, dout, dlse.masked_fill(dead, 0.0))
        # A row with no key would see exp(-inf + inf); with +inf every weight of it is 0.
        lse = lse.masked_fill(dead, torch.inf)
        dq, dk, dv = _Sum(q), _Sum(k), _Sum(v)
        whole = _Whole(q, out, lse, dout, dq, ctx.how)
        with torch.autocast(q.device.type, enabled=False):
            for number, branch in enumerate(ctx.branches):
                _backward_branch(number, branch, whole, k, v, dk, dv)
        grads = (total.total[..., :width].to(q.dtype) for total in (dq, dk, dv))
        return *grads, None, None, None


def _with_lse_gradient(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add a column that carries `dlse` through the kernels as they are.

    The scores' gradient is P (dout v^T + dlse - sum(dout out)): a column of ones in v and of dlse in
    dout adds dlse to the product, and zeros in out, q and k keep the rest as it was.
    """
    nothing, one = q.new_zeros(1), v.new_ones(1)
    dlse = dlse.to(dout.dtype).unsqueeze(-1)
    columns = (nothing.expand(*q.shape[:3], 1), nothing.expand(*k.shape[:3], 1), one.expand(*v.shape[:3], 1))
    q, k, v = (torch.cat((x, column), -1) for x, column in zip((q, k, v), columns, strict=True))
    return q, k, v, torch.cat((out, torch.zeros_like(dlse)), -1), torch.cat((dout, dlse), -1)


def with_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v, repeated where several heads of `q` share a head of theirs."""
    times = q.shape[1] // max(k.shape[1], 1)
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def piecewise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: Sequence[RingPart],
    scale: float,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """One softmax over all pairs of all pieces of all branches, differentiable in both outputs.

    Every rank of a branch's ring must call this with that branch at the same place in `branches`.

    Args:
        q: (B, H, N, D), this rank's rows.
        k: (B, h, M, D); M == N where several ranks take part. h divides H, and is H for views of some heads
            only: `with_every_head`.
        v: (B, h, M, D).
        branches: see `RingPart`.
        scale: factor on the scores.
        dropout: of the weights; its blocks are computed by the reference, whose memory is rows times keys.
            lse is that of the weights before dropout.

    Returns:
        out (B, H, N, D) in q's dtype and lse (B, H, N) in float32 (float64 for float64); a row with no
        key has out 0 and lse -inf, and gives no gradient.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _PiecewiseAttention.apply
    return apply(q, k, v, branches, scale, dropout)
