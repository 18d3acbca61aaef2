"""The reference for a dense block: plain matrix products, accumulated in float32 (float64 for float64).

Every other implementation is tested against this one. Memory is rows times keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distributed_kernels.attention.patterns import KeptBlocks

Grads = tuple[Tensor, Tensor, Tensor]


class Block(NamedTuple):
    """The input of one dense block, as `block_kernels.block_forward` documents it."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    mask: Tensor | None = None
    factors: Tensor | None = None
    kept: KeptBlocks | None = None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tensors of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(block: Block) -> Tensor:
    q, k, _, causal, scale, mask = block[:6]
    wide = accumulator(q.dtype)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if block.kept is not None:
        scores = scores.masked_fill(~block.kept.pairs(*scores.shape[-2:]), -torch.inf)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one block; defined in `block_kernels.block_forward`."""
    scores = _scores(block)
    lse = torch.logsumexp(scores, -1)
    # A row with no key: exp(-inf - inf) is 0, exp(-inf - -inf) would be NaN.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))
    if block.factors is not None:
        weights = weights * block.factors
    return (weights @ block.v.to(weights.dtype)).to(block.q.dtype), lse


def backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> Grads:
    """Return (dq, dk, dv) of one block; see `block_kernels.block_backward` for the (out, lse)."""
    weights = torch.exp(_scores(block) - lse.unsqueeze(-1))
    wide = weights.dtype
    dout, q, k, v = (x.to(wide) for x in (dout, block.q, block.k, block.v))
    delta = (dout * out.to(wide)).sum(-1, keepdim=True)
    dweights = dout @ v.mT
    used = weights
    if block.factors is not None:
        # delta holds them already, because out was computed with them.
        dweights, used = dweights * block.factors, weights * block.factors
    dscores = weights * (dweights - delta) * block.scale
    return dscores @ k, dscores.mT @ q, used.mT @ dout
