"""Dense attention that also returns the logarithm of its softmax's denominator, and the merge of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distributed_kernels.attention.block_kernels_reference import accumulator
from distributed_kernels.attention.engine import Piece, draw_dropout, local, piecewise_attention
from distributed_kernels.attention.input_checks import check_attention, check_dropout, scale_of
from distributed_kernels.attention.row_views import RowRange, RowView
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names


@answers_foreign_names
def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v and the softmax's log-denominator, both differentiable, memory linear.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, shared, keys, head_dim); `shared` divides heads, and head h of q reads head
            h // (heads / shared) (grouped-query attention).
        v: (batch, shared, keys, head_dim).
        causal: query i sees keys 0..i (aligned at the top left when there are more of one than of the
            other, as in `torch.nn.functional.scaled_dot_product_attention`).
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        block_mask: bool, broadcastable to (batch, heads, queries, keys), True where a key may be seen.
            It is applied together with `causal`, and has the memory of what it broadcasts from.
        dropout_p: probability with which a weight is dropped after the softmax; others are divided by 1 - p.
            Masks are drawn from torch's global generator. 0.0 in evaluation.

    Returns:
        out, shaped and typed as q, and lse (batch, heads, queries) in float32 (float64 for float64). A
        query with no key has out 0 and lse -inf, and passes no gradient on.

    Raises:
        KernelError: tensors that do not agree, a mask that does not broadcast or is not boolean, or half
            precision on a device without it.
    """
    check_attention(q, k, v, same_length=False)
    check_dropout(dropout_p)
    if block_mask is not None:
        _check_mask(block_mask, (*q.shape[:3], k.shape[2]))
    pieces = dense_pieces(q.shape[2], k.shape[2], causal, block_mask)
    return piecewise_attention(q, k, v, [local(pieces)], scale_of(q, scale), draw_dropout(dropout_p))


def dense_pieces(queries: int, keys: int, causal: bool, mask: Tensor | None) -> list[Piece]:
    """Pieces of every query against every key; arguments as for `attention_with_lse`."""
    if mask is not None and causal:
        mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    if mask is not None or not causal or queries == keys:
        return [Piece(RowView.all(queries), RowView.all(keys), causal and mask is None, mask=mask)]
    # Kernels disagree about which corner a causal rectangle hangs from; a square leaves no choice.
    square = min(queries, keys)
    pieces = [
        Piece(RowView.rows(RowRange(0, square, square)), RowView.rows(RowRange(0, square, square)), True)
    ]
    if queries > keys:
        rest = queries - square
        pieces.append(Piece(RowView.rows(RowRange(square, rest, rest)), RowView.all(keys)))
    return pieces


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool:
        raise KernelError(
            "block_mask: must be boolean",
            got=mask.dtype,
            allowed="torch.bool, True where a key may be seen",
            remedy="For an additive mask of 0 and -inf give mask == 0",
        )
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > 4 or any(mine not in (1, wanted) for mine, wanted in sizes):
        raise KernelError(
            "block_mask: does not broadcast to (batch, heads, queries, keys)",
            got=tuple(mask.shape),
            allowed=f"any that broadcasts to {shape}",
            remedy="A mask for each sequence needs its own dimension for heads: mask[:, None]",
        )


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over several sets of keys from the attention over each: out = sum softmax(lse)_i out_i.

    Differentiable in all inputs; exact when each pair is the (out, lse) of the same queries over other
    keys. A key in several sets counts several times.

    Args:
        outs: tensors (batch, heads, length, head_dim).
        lses: tensors (batch, heads, length); -inf means that the query has no key in that set.

    Returns:
        out and lse, shaped as each of the inputs. A query with no key in any: out 0, lse -inf, no gradient.

    Raises:
        KernelError: no inputs, unequal numbers of both, or shapes that do not agree.
    """
    _check_merge(outs, lses)
    stacked = torch.stack([lse.to(accumulator(lse.dtype)) for lse in lses])
    dead = (stacked == -torch.inf).all(0)
    # Zeros stand in where no set has a key: -inf minus -inf is NaN, and so would be its gradient.
    total = torch.logsumexp(stacked.masked_fill(dead, 0.0), 0)
    shares = torch.exp(stacked - total).unsqueeze(-1)
    out = sum((share * out for share, out in zip(shares, outs, strict=True)), shares.new_zeros(()))
    return out.to(outs[0].dtype), total.masked_fill(dead, -torch.inf)


def _check_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise KernelError(
            "outs and lses: one lse for each out, at least one",
            got=f"{len(outs)} outs and {len(lses)} lses",
            remedy="Give the pairs that attention_with_lse returned",
        )
    for place, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != outs[0].shape[:-1]:
            raise KernelError(
                f"outs[{place}] and lses[{place}]: shapes do not agree with the first out's",
                got=f"{tuple(out.shape)} and {tuple(lse.shape)}",
                allowed=f"{tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}",
                remedy="All pairs must be of the same queries",
            )
