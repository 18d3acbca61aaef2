"""Two thin matrices in place of one: the factorisations that initialise and convert layers.

A dense weight W has shape (out, in), as in `nn.Linear`. Factors are called as in `SKLinear`:
`factor_in` of shape (rank, in) and `factor_out` of shape (out, rank), W ~ factor_out @ factor_in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

OVERSAMPLING = 10
"""Directions that the randomized SVD follows beyond those asked for (Halko, Martinsson and Tropp, 2011)."""
_POWER_STEPS = 2
_LARGE = 256


def truncated_svd(weight: Tensor, rank: int, method: str = "svd") -> tuple[Tensor, Tensor, Tensor]:
    """The leading part of a singular value decomposition.

    Args:
        weight: (out, in).
        rank: singular triples wanted.
        method: ``svd``, exact; ``rsvd``, randomized, of about 4 rank out in multiply-adds a pass; it draws
            the same numbers every time, and leaves the caller's random state alone.

    Returns:
        U (out, rank), S (rank,) descending, V^T (rank, in).
    """
    rank = min(rank, *weight.shape)
    if method == "svd":
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :rank], s[:rank], vt[:rank]
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        size = min(rank + OVERSAMPLING, *weight.shape)
        u, s, v = torch.svd_lowrank(weight, q=size, niter=_POWER_STEPS)
    return u[:, :rank], s[:rank], v[:, :rank].mT


def balanced(u: Tensor, s: Tensor, vt: Tensor) -> tuple[Tensor, Tensor]:
    """(factor_in, factor_out) = (S^1/2 V^T, U S^1/2), equal in scale: one learning rate suits both."""
    root = s.clamp(min=0).sqrt()
    return root[:, None] * vt, u * root


def spectral(weight: Tensor, rank: int, *, keep_norm: bool = True) -> tuple[Tensor, Tensor]:
    """(factor_in, factor_out): the best approximation of `weight` of that rank, scaled to its Frobenius norm
    unless `keep_norm` is false.

    The norm is what the size of the outputs follows, and truncating takes much of it. Spectral
    initialisation is that of Khodak et al. (2021).
    """
    method = "rsvd" if min(weight.shape) > max(_LARGE, 2 * (rank + OVERSAMPLING)) else "svd"
    u, s, vt = truncated_svd(weight, rank, method)
    factor_in, factor_out = balanced(u, s * rescaled(weight, s) if keep_norm else s, vt)
    if len(s) == rank:
        return factor_in, factor_out
    # More than the weight has: directions that change nothing yet and can be learned.
    more = torch.randn(rank - len(s), weight.shape[1], device=weight.device, dtype=weight.dtype)
    more *= factor_in.square().mean().sqrt()
    return torch.cat([factor_in, more]), F.pad(factor_out, (0, len(more)))


def least_squares(weight: Tensor, frozen_in: Tensor, frozen_out: Tensor) -> tuple[Tensor, Tensor]:
    """The trainable halves that come nearest to `weight` when the other halves are given.

    Args:
        weight: W, (out, in).
        frozen_in: (r2, in).
        frozen_out: (out, r1).

    Returns:
        (factor_in (r1, in), factor_out (out, r2)) with the least
        ``||W - frozen_out @ factor_in - factor_out @ frozen_in||``, which is ``||(I - P1) W (I - P2)||``
        for the projections P1 on the columns of `frozen_out` and P2 on the rows of `frozen_in`.
    """
    factor_out = weight @ torch.linalg.pinv(frozen_in)
    factor_in = torch.linalg.pinv(frozen_out) @ (weight - factor_out @ frozen_in)
    return factor_in, factor_out


def rescaled(weight: Tensor, fitted: Tensor) -> Tensor:
    """The number that gives `fitted` the Frobenius norm of `weight`."""
    scale: Tensor = weight.norm() / fitted.norm().clamp(min=torch.finfo(weight.dtype).tiny)
    return scale
