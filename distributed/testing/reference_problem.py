"""The reference problem in torch, which every backend of every framework trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = [
    "OPTIMIZERS",
    "Deep",
    "distance",
    "OwnLoss",
    "make_optimizer",
    "masked_mean",
    "problem",
    "small_model",
    "weighted_mean",
]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.01),
}
"""Optimizers by kind; a learning rate completes them. The large eps keeps AdamW from amplifying
rounding where gradients vanish."""


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """6 -> 8 -> tanh -> 3, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class OwnLoss(nn.Module):
    """`small_model` as libraries wrap theirs: takes a batch by name and returns its loss, a mean over
    unmasked labels, beside its output.

    Args:
        body: twin of `small_model`; None for itself.
    """

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = small_model() if body is None else body

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(inputs)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class _Block(nn.Module):
    """x + linear(tanh(linear(x))) with dropout; counts its calls."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.calls = nn.Dropout(dropout), 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        out: Tensor = x + self.drop(self.outer(torch.tanh(self.inner(x))))
        return out


class Deep(nn.Module):
    """6 -> two blocks of width 8 -> 3 in float64, the same weights every time.

    Args:
        dropout: probability, in the blocks.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
            self.blocks = nn.ModuleList(_Block(dropout) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.leave(x)
        return out


def problem(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """`length` samples of 6 numbers with a class in 0..2."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (length,), generator=generator)


def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest difference between parameters at the same place in two modules."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


def make_optimizer(kind: str, parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS` over `parameters`."""
    return OPTIMIZERS[kind](parameters, lr=rate)


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over targets other than -100; 0 where there is none, not NaN."""
    return cross_entropy(output, target, reduction="sum") / (target != -100).sum().clamp(min=1)


def weighted_mean(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with the weight ``target + 1`` per sample, over the sum of the weights."""
    weight = target + 1
    return (cross_entropy(output, target, reduction="none") * weight).sum() / weight.sum()
