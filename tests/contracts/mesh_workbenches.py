"""What the conformance kit trains under an axis that its own models and data do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from distributed.testing.reference_problem import Deep, small_model
from distributed.testing.torch_workbench import TorchWorkbench

__all__ = ["ExpertWorkbench", "MeshWorkbench", "OnExperts", "OnSlices", "SliceWorkbench"]


class MeshWorkbench(TorchWorkbench):
    """A model of one parameter cannot be cut: beside it stands a pair of layers that does not learn."""

    def memory_model(self, length: int) -> nn.Module:
        return _Beside(length, nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)))

    def weights(self, model: nn.Module) -> list[Tensor]:
        found = super().weights(model)
        return found[:1] if isinstance(model, _Beside) else found


class _Beside(nn.Module):
    """The memory, and layers that add nothing to it."""

    def __init__(self, length: int, layers: nn.Module) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(length, dtype=torch.float64))
        self.layers = layers.double().requires_grad_(False)

    def forward(self, index: Tensor) -> Tensor:
        cells = self.cells[index]
        nothing: Tensor = self.layers(torch.zeros(*cells.shape, 1, dtype=torch.float64))
        return cells + 0.0 * nothing[..., 0]


# -- slices of sequences ------------------------------------------------------------------------------------


class SliceWorkbench(TorchWorkbench):
    """Each sample is a sequence of two positions with the same inputs, of which one has the target and the
    other is masked, in turns. The mean over tokens is that over samples, and slices have unequal numbers of
    tokens, or none. A function that would have to see whole sequences is a loss or a metric over tokens."""

    def data(self, *columns: Tensor) -> Any:
        places = torch.arange(len(columns[0])) % 2
        inputs = torch.stack([columns[0], columns[0]], dim=1)
        target = columns[1] if len(columns) > 1 else torch.zeros_like(places)
        masked = torch.full((len(target), 2), -100, dtype=target.dtype)
        return inputs, masked.scatter(1, places[:, None], target[:, None])

    def memory_task(self) -> dict[str, Any]:
        return {"loss_fn": _cells}

    def weighted_loss(self) -> Any:
        return _weighted

    def validation_task(self) -> dict[str, Any]:
        return {"loss_fn": _squares, "metrics": {"id": _ids}}


class OnSlices:
    """Settings of the kit for ranks that hold slices of sequences."""

    options: Mapping[str, Any] = MappingProxyType({"parallel.context": 2})
    workbench = SliceWorkbench
    by_name = False


def _cells(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target != -100
    return (output * kept).sum(), kept.sum()


def _weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    losses = cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    weight = (target.flatten() + 1).clamp(min=0)
    return (losses * weight).sum(), weight.sum()


def _squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return _cells(output.square().sum(-1), target)


def _ids(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target != -100
    return (target * kept).sum(), kept.sum()


# -- experts ------------------------------------------------------------------------------------------------


class GatheredLinear(nn.Linear):
    """A linear layer whose outputs are experts: ranks hold rows of its weight, and gather them to compute."""

    group: Any = None

    def expert_parameters(self) -> list[str]:
        return ["weight", "bias"]

    def set_expert_group(self, group: Any) -> None:
        self.group = group
        for name in self.expert_parameters():
            own = getattr(self, name).detach().chunk(group.size())[group.rank()].clone()
            setattr(self, name, nn.Parameter(own))

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        weight, bias = (_Gathered.apply(part, self.group) for part in (self.weight, self.bias))
        return linear(x, weight, bias)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks; what the ranks compute with a row is added for its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def _gathered(layer: nn.Linear) -> GatheredLinear:
    made = GatheredLinear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
    made.load_state_dict(layer.state_dict())
    return made


class ExpertWorkbench(MeshWorkbench):
    """The first layer of a model is one of experts, with the same weights."""

    def model(self, dtype: torch.dtype) -> nn.Module:
        first, activation, last = small_model(dtype)
        return nn.Sequential(_gathered(first), activation, last)

    def noisy_model(self) -> nn.Module:
        first, activation, last = self.model(torch.float32).children()
        return nn.Sequential(first, activation, nn.Dropout(0.2), last)

    def deep_model(self, dropout: float) -> nn.Module:
        model = Deep(dropout)
        model.enter = _gathered(model.enter)
        return model

    def memory_model(self, length: int) -> nn.Module:
        return _Beside(length, nn.Sequential(GatheredLinear(1, 2), nn.Linear(2, 1)))


class OnExperts:
    """Settings of the kit for ranks that divide experts."""

    options: Mapping[str, Any] = MappingProxyType({"parallel.expert": 2})
    workbench = ExpertWorkbench
