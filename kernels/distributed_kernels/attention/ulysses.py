"""Ulysses attention (arXiv:2309.14509): for the time of the attention, ranks hold heads instead of rows.

An all-to-all turns slices of the sequence with all heads into the whole sequence with a share of the
heads, and another one turns the result back. It moves less than a ring, and takes any attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from distributed_kernels.attention.dense import dense_pieces
from distributed_kernels.attention.engine import Dropout, draw_dropout, local, piecewise_attention
from distributed_kernels.attention.input_checks import check_attention, check_dropout, scale_of
from distributed_kernels.attention.ring_exchange import (
    all_to_all,
    check_equal_slices,
    default_group,
    gather_key_masks,
)
from distributed_kernels.errors import KernelError
from distributed_kernels.foreign_names import answers_foreign_names

_Step = Callable[[Tensor, ProcessGroup], Tensor]


@answers_foreign_names
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    causal: bool = False,
    scale: float | None = None,
    attention: Callable[..., Tensor] | None = None,
    dropout_p: float = 0.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention over the whole sequence, of which each rank of `group` holds a contiguous slice.

    Received per rank: 2 batch (heads + h) head_dim length (P - 1) / P elements forward, with h heads of keys,
    and as many backward.

    Args:
        q: (batch, heads, length, head_dim), this rank's slice, of one length on all ranks.
        k, v: the same; or with fewer heads, which divide those of q and are multiples of the group's size
            (grouped-query attention).
        group: the ranks that hold the sequence, in its order; torch's default group when None.
        causal: a query sees no later position.
        scale: factor on the scores; 1/sqrt(head_dim) when None.
        attention: called as ``attention(q, k, v, causal=, scale=)`` on the whole sequence of this rank's
            share of the heads, neighbouring ones; dense attention when None. One that treats heads
            differently takes ``first_head=`` and ``total_heads=`` as well, as `dilated_attention` does:
            ``functools.partial(dilated_attention, segment_lengths=..., dilation_rates=...)``.
        dropout_p: probability with which dense attention drops a weight after the softmax; others are divided
            by 1 - p. Masks are drawn from torch's global generator. 0.0 in evaluation.
        key_mask: bool (batch, length), True where a key of this rank's slice may be seen by dense attention;
            on all ranks or on none.

    Returns:
        out, shaped and typed as q.

    Raises:
        KernelError: tensors or ranks that do not agree, heads that the group's size does not divide, or
            `dropout_p` or `key_mask` beside an `attention`, which takes its own.
    """
    check_attention(q, k, v)
    check_dropout(dropout_p)
    group = default_group(group)
    check_equal_slices(q, group)
    for name, x in (("q", q), ("k", k)):
        _check_heads(name, x.shape[1], group.size())
    if attention is None:
        mask = None if key_mask is None else torch.cat(gather_key_masks(key_mask, q, group), 1)
        attention = partial(_dense, mask=mask, dropout=draw_dropout(dropout_p, group))
    elif dropout_p or key_mask is not None:
        raise KernelError(
            "attention: dropout and masks are those of dense attention",
            got=f"dropout_p={dropout_p}, key_mask={'None' if key_mask is None else 'a tensor'}",
            allowed="dropout_p=0.0 and key_mask=None",
            remedy="Give them to the attention, by functools.partial",
        )
    exchange: Callable[..., Tensor] = _Exchange.apply
    keywords: dict[str, Any] = {"causal": causal, "scale": scale}
    taken = inspect.signature(attention).parameters
    if "first_head" in taken:
        keywords["first_head"] = dist.get_rank(group) * (q.shape[1] // group.size())
    if "total_heads" in taken:
        keywords["total_heads"] = q.shape[1]
    q, k, v = (exchange(x, group, _to_heads, _to_rows) for x in (q, k, v))
    return exchange(attention(q, k, v, **keywords), group, _to_rows, _to_heads)


def _check_heads(name: str, heads: int, size: int) -> None:
    if heads % size:
        raise KernelError(
            f"{name}: {heads} heads cannot be shared by {size} ranks",
            got=heads,
            allowed=f"multiples of {size}",
            remedy="Choose another number of heads or a smaller group, or use ring_attention",
        )


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None,
    dropout: Dropout | None,
) -> Tensor:
    """Attention over the whole sequence; `mask` is bool (batch, length), of the keys."""
    block_mask = None if mask is None else mask[:, None, None, :]
    pieces = dense_pieces(q.shape[2], k.shape[2], causal, block_mask)
    return piecewise_attention(q, k, v, [local(pieces)], scale_of(q, scale), dropout)[0]


def _to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, H, n, D) -> (B, H / P, P n, D)."""
    shares: Tensor = x.unflatten(1, (group.size(), -1))
    arrived = all_to_all(shares.movedim(1, 0), group)
    return arrived.movedim(0, 2).flatten(2, 3)


def _to_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, H / P, P n, D) -> (B, H, n, D): undoes `_to_heads`."""
    shares: Tensor = x.unflatten(2, (group.size(), -1))
    arrived = all_to_all(shares.movedim(2, 0), group)
    return arrived.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """`exchange` forward, and `undo`, which is its inverse and its transpose, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, exchange: _Step, undo: _Step) -> Tensor:
        ctx.group, ctx.undo = group, undo
        return exchange(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.undo(grad, ctx.group), None, None, None
