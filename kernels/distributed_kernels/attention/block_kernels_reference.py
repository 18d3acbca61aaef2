"""The reference for a dense block: plain matrix products, accumulated in float32 (float64 for float64).

Every other implementation is tested against this one. Memory is rows times keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulator", "backward", "forward"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tensors of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    wide = accumulator(q.dtype)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one block; defined in `blocks.block_forward`."""
    scores = _scores(q, k, causal, scale, mask)
    lse = torch.logsumexp(scores, -1)
    # A row with no key: exp(-inf - inf) is 0, exp(-inf - -inf) would be NaN.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of one block; see `blocks.block_backward` for the (out, lse)."""
    weights = torch.exp(_scores(q, k, causal, scale, mask) - lse.unsqueeze(-1))
    wide = weights.dtype
    dout, q, k, v = dout.to(wide), q.to(wide), k.to(wide), v.to(wide)
    delta = (dout * out.to(wide)).sum(-1, keepdim=True)
    dscores = weights * (dout @ v.mT - delta) * scale
    return dscores @ k, dscores.mT @ q, weights.mT @ dout
