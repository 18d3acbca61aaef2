"""bf16, and fp16 with a gradient scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.ranks import number_of_ranks, trainer

__all__ = ["half", "scaler"]

_POISONED = 3
"""The forward pass, from 1, whose gradient is infinite."""
_BATCH, _SAMPLES, _RATE = 32, 512, 0.5
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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


def _model(setting: Settings) -> nn.Sequential:
    torch.manual_seed(0)
    width = setting.pick(512, 32)
    hidden = [nn.Linear(6, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(width, 3))


def _losses(setting: Settings, precision: str, transport: str) -> list[float]:
    ours = trainer(
        setting,
        _model(setting),
        "pytorch-ddp",
        transport,
        mixed_precision=precision,
        global_batch_size=_BATCH,
        optimizer="sgd",
        learning_rate=_RATE,
        data={"shuffle": False},
    )
    history = ours.fit(_data(_SAMPLES), max_steps=_steps(setting))
    return [float(loss) for loss in history.steps["loss"]]


def _steps(setting: Settings) -> int:
    return int(setting.pick(100, 30))


def _losses_by_hand(setting: Settings, precision: str, ranks: int) -> list[float]:
    """torch's recipe: autocast, and in fp16 a gradient scaler. Micro-batches take the place of ranks."""
    device, model = setting.device, _model(setting).to(setting.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    batches = [data.to(device).split(_BATCH) for data in _data(_SAMPLES)]
    losses = []
    for step in range(_steps(setting)):
        optimizer.zero_grad()
        x, y = (parts[step % len(parts)].split(_BATCH // ranks) for parts in batches)
        found = 0.0
        for part, target in zip(x, y, strict=True):
            with torch.autocast(device, _DTYPES[precision]):
                loss = F.cross_entropy(model(part), target) / ranks
            scaler.scale(loss).backward()
            found += float(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        losses.append(found)
    return losses


def half(setting: Settings, precision: str, transport: str) -> Iterator[Measured]:
    """The same run by a hand-written loop."""
    ranks = number_of_ranks(setting, "pytorch-ddp", transport)
    ours, theirs = _losses(setting, precision, transport), _losses_by_hand(setting, precision, ranks)
    ends = [fmean(losses[-_LAST:]) for losses in (ours, theirs)]
    fell = ends[0] < 0.8 * ours[0]
    detail = f"loss {ours[0]:.3f} -> {ends[0]:.4f}, by hand {ends[1]:.4f}"
    yield Measured(abs(ends[0] - ends[1]) / ends[1] if fell else math.nan, detail)


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
