"""bf16, and fp16 with a gradient scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.ranks import trainer

__all__ = ["half", "scaler"]

_POISONED = 3
"""The forward pass, from 1, whose gradient is infinite."""
_LAST = 5
"""Losses at the end of a run that are averaged."""


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


class Poisoned(nn.Module):
    """An MLP one of whose backward passes gives infinite gradients; its losses stay finite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(6, width), nn.Linear(width, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x)
        result: Tensor = self.last(torch.tanh(_Infinite.apply(hidden) if self.calls == _POISONED else hidden))
        return result


def _data(length: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(dim=1)


def _losses(setting: Settings, precision: str, transport: str) -> list[float]:
    torch.manual_seed(0)
    width = setting.pick(512, 32)
    hidden = [nn.Linear(6, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*hidden, nn.Linear(width, 3))
    ours = trainer(
        setting,
        model,
        "pytorch-ddp",
        transport,
        mixed_precision=precision,
        global_batch_size=32,
        learning_rate=1e-2,
    )
    history = ours.fit(_data(512), max_steps=setting.pick(100, 30))
    return [float(loss) for loss in history.steps["loss"]]


def half(setting: Settings, precision: str, transport: str) -> Iterator[Measured]:
    """The same run in `precision` and in fp32."""
    wide, narrow = (_losses(setting, name, transport) for name in ("fp32", precision))
    ends = [fmean(losses[-_LAST:]) for losses in (wide, narrow)]
    fell = ends[1] < 0.8 * narrow[0]
    detail = f"loss {narrow[0]:.3f} -> {ends[1]:.3f}, fp32 {ends[0]:.3f}"
    yield Measured(abs(ends[1] - ends[0]) / ends[0] if fell else math.nan, detail)


def scaler(setting: Settings, transport: str) -> Iterator[Measured]:
    """One step with an infinite gradient: it is skipped, on all ranks, and no other."""
    torch.manual_seed(0)
    model, steps = Poisoned(setting.pick(512, 16)), 8
    ours = trainer(
        setting,
        model,
        "pytorch-ddp",
        transport,
        mixed_precision="fp16",
        scaler_init_scale=1024.0,
        global_batch_size=32,
        learning_rate=1e-3,
    )
    history = ours.fit(_data(32 * steps), max_steps=steps)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    skipped = history.num_skipped_steps
    yield Measured(abs(skipped - 1) if finite else math.nan, f"{skipped} of {steps} steps skipped")
