"""The kit's workbench for torch: the reference itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed.interfaces.state import StateReader
from distributed.testing.reference_problem import OPTIMIZERS, small_model
from distributed.testing.workbench import Workbench

__all__ = ["TorchWorkbench"]


class TorchWorkbench(Workbench):
    """Modules, optimizers and schedulers of torch."""

    def model(self, dtype: torch.dtype) -> nn.Module:
        return small_model(dtype)

    def noisy_model(self) -> nn.Module:
        first, activation, last = small_model(torch.float32)
        return nn.Sequential(first, activation, nn.Dropout(0.2), last)

    def weights(self, model: nn.Module) -> list[Tensor]:
        return [p.detach().to("cpu", torch.float64, copy=True) for p in model.parameters()]

    def saved_weights(self, reader: StateReader) -> list[Tensor] | None:
        shapes = reader.tensors()
        names = [name for name, _ in small_model().named_parameters()]
        return [reader.read("model", name).double().view(shapes["model", name]) for name in names]

    def memory_model(self, length: int) -> nn.Module:
        return _Memory(length)

    def memory_step(self) -> Callable[[Any, Any], Any]:
        return _read_memory

    def optimizer(self, kind: str) -> Any:
        return OPTIMIZERS[kind]

    def weighted_loss(self) -> Callable[[Any, Any], Any]:
        return _sum_and_count

    def validation_step(self) -> Callable[[Any, Any], dict[str, Any]]:
        return _ids

    def halving_schedule(self) -> Any:
        return _halving


class _Memory(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(length, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.cells[index]


def _read_memory(model: nn.Module, batch: list[Tensor]) -> Tensor:
    result: Tensor = model(batch[0]).mean()
    return result


def _sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weight = target + 1
    return (cross_entropy(output, target, reduction="none") * weight).sum(), weight.sum()


def _ids(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    model(batch[0])
    return {"id": (batch[1].sum(), len(batch[1]))}


def _halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
