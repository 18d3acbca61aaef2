"""Dilated attention on one rank: one gather, one attention call and one merge for each branch.

Forward, the branches' outputs are mixed by the softmax of their lse. Backward, the attention operator of each
branch gets the output and lse of the *whole* softmax, with which its gradients are the branch's exact share
(see `block_kernels`), and these are added up. The number of operators depends on the branches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distributed_kernels.attention.block_kernels import block_backward, block_forward, chosen_blocks
from distributed_kernels.attention.block_kernels_reference import Grads
from distributed_kernels.attention.dilated_copies import Copies, chosen_copies, exact_on_device, same_strides
from distributed_kernels.attention.dilated_tiles import DilatedPlan


class TileAttention(NamedTuple):
    """Attention of a tile.

    Attributes:
        forward: (q, k, v, causal, scale) -> (out, lse), all (b, h, rows, D).
        backward: (dout, q, k, v, out, lse, causal, scale) -> (dq, dk, dv), with the (out, lse) of the whole
            softmax.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]


def tile_attention(q: Tensor) -> TileAttention:
    """The implementation that `use_blocks` selects for tensors like `q`."""
    blocks = chosen_blocks(q)
    return TileAttention(partial(block_forward, blocks=blocks), partial(block_backward, blocks=blocks))


def fused_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DilatedPlan,
    causal: bool,
    scale: float,
    attention: TileAttention | None = None,
) -> Tensor:
    """One softmax over the pairs of all tiles of `plan`.

    Saved for the backward: q, k, v, out and lse.

    Args:
        q, k, v: (B, H, N, D) each, not empty.
        plan: of N rows and H heads.
        causal: a query sees no later row.
        scale: factor on the scores.
        attention: of a tile; `tile_attention(q)` when None.

    Returns:
        out, shaped and typed as q.
    """
    apply: Callable[..., Tensor] = _FusedDilated.apply
    # Kernels read rows of D neighbouring elements.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return apply(q, k, v, plan, causal, scale, attention or tile_attention(q))


class _FusedDilated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: DilatedPlan,
        causal: bool,
        scale: float,
        attention: TileAttention,
    ) -> Tensor:
        ctx.plan, ctx.copies = plan, chosen_copies(q, k, v, plan)
        ctx.attend = partial(attention.backward, causal=causal, scale=scale)
        copies: Copies = ctx.copies(q, plan)
        with exact_on_device(q):
            for _, tile in plan.tiles:
                blocks, fold = copies.gather(tile, (q, k, v))
                copies.take(*attention.forward(*blocks, causal=causal, scale=scale), fold)
            out, lse = copies.mixed()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if not same_strides(dout, out):
            dout = torch.empty_like(out).copy_(dout)
        with exact_on_device(q):
            grads = _gradients((q, k, v, out, dout, lse), ctx.plan, ctx.copies(q, ctx.plan), ctx.attend)
        return *grads, None, None, None, None


def _gradients(
    given: Sequence[Tensor], plan: DilatedPlan, copies: Copies, attend: Callable[..., Grads]
) -> Sequence[Tensor]:
    """(dq, dk, dv), in q's dtype: wider sums would take more memory than all of dense attention does.

    Args:
        given: q, k, v, out, dout, lse.
    """
    q, totals = given[0], None
    if not plan.whole:
        totals = [torch.zeros_like(q, memory_format=torch.contiguous_format) for _ in range(3)]
    for tile in plan.backward:
        blocks, fold = copies.gather(tile, given)
        grads = attend(blocks[4], *blocks[:4], blocks[5])
        del blocks
        if totals is None:
            # The first tile is all rows, and its gradients become the sums.
            totals = [tile.whole(grad, fold, q).to(q.dtype) for grad in grads]
        else:
            copies.add(tile, totals, grads, fold)
        del grads  # else they would be there beside those of the next tile
    return totals or ()
