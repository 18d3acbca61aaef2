"""The oracle: one process, the whole global batch at once, nothing but PyTorch.

Everything a backend does is compared with what this page does. It uses two facts of the
project, both published: the order of samples is ``randperm(n)`` under the seed of
(seed, epoch), or from 2**24 samples on `KeyedOrder`, and a global batch is the next
`global_batch_size` samples of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distributed.data import epoch_seed
from distributed.data.keyed_order import LARGE, KeyedOrder

__all__ = ["OracleResult", "oracle_fit", "sample_order"]


@dataclass
class OracleResult:
    """Record of the oracle: per step the loss, the gradient norm before clipping, the rate."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def sample_order(length: int, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """Indices of an epoch's samples in the order in which one process reads them."""
    if not shuffle:
        return torch.arange(length)
    if length >= LARGE:
        return KeyedOrder(length, seed, epoch)[:]
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def oracle_fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    *,
    global_batch_size: int,
    steps: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    max_norm: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    seed: int = 0,
    shuffle: bool = True,
    skip_non_finite: bool = False,
) -> OracleResult:
    """Train `model` for `steps` optimizer steps, epoch after epoch. With `skip_non_finite`,
    gradients that are not finite move neither weights nor schedule."""
    seen = OracleResult()
    epoch = 0
    while True:
        order = sample_order(len(x), seed, epoch, shuffle)
        for start in range(0, len(x), global_batch_size):
            batch = order[start : start + global_batch_size]
            optimizer.zero_grad()
            loss = loss_fn(model(x[batch]), y[batch])
            loss.backward()
            limit = max_norm if max_norm is not None else float("inf")
            seen.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            seen.losses.append(float(loss.detach()))
            seen.rates.append(optimizer.param_groups[0]["lr"])
            if math.isfinite(seen.norms[-1]) or not skip_non_finite:
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            if len(seen.losses) == steps:
                return seen
        epoch += 1
