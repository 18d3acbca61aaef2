"""Inputs, and the comparison of a function with its oracle, for the attention tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BOUNDS = {torch.float64: 1e-10, torch.float32: 5e-6}
"""Error allowed in outputs and gradients, relative to the largest of each if that is above 1."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(
    *shape: int, dtype: torch.dtype = torch.float64, count: int = 3, spread: float = 1.0
) -> list[Tensor]:
    """`count` leaves of normal numbers; those of one seed are the same in every dtype."""
    drawn = [torch.randn(shape, dtype=torch.float64) * spread for _ in range(count)]
    return [x.to(dtype).requires_grad_() for x in drawn]


def error(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest of `theirs` if that is above 1."""
    if not mine.numel():
        return 0.0
    return ((mine.double() - theirs).abs().max() / max(1.0, theirs.abs().max().item())).item()


def errors(function: Attention, oracle: Attention, qkv: list[Tensor]) -> list[float]:
    """Errors of out, dq, dk, dv against the oracle in float64 on the same numbers."""
    out = function(*qkv)
    dout = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, qkv, dout)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    wanted = oracle(*exact)
    wanted_grads = torch.autograd.grad(wanted, exact, dout.double())
    return [error(*pair) for pair in zip((out, *grads), (wanted, *wanted_grads), strict=True)]


def assert_matches(function: Attention, oracle: Attention, qkv: list[Tensor]) -> None:
    """Fail unless `function` is the oracle within its dtype's bound."""
    bound = BOUNDS[qkv[0].dtype]
    found = errors(function, oracle, qkv)
    assert max(found) <= bound, dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
