"""The backends with several axes pass the kit on a mesh, too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from distributed.testing.conformance import BackendConformance
from distributed.testing.torch_workbench import TorchWorkbench

FEWER = range(1, 14)
TENSOR: Mapping[str, Any] = MappingProxyType({"parallel.tensor": 2})
PIPELINE: Mapping[str, Any] = MappingProxyType({"parallel.pipeline": 2, "parallel.schedule": "gpipe"})


class MeshWorkbench(TorchWorkbench):
    """A model of one parameter cannot be cut: beside it stands a pair of layers that does not learn."""

    def memory_model(self, length: int) -> nn.Module:
        return _Memory(length)

    def weights(self, model: nn.Module) -> list[Tensor]:
        found = super().weights(model)
        return found[:1] if isinstance(model, _Memory) else found


class _Memory(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(length, dtype=torch.float64))
        layers = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
        self.pair = layers.double().requires_grad_(False)

    def forward(self, index: Tensor) -> Tensor:
        cells = self.cells[index]
        nothing: Tensor = self.pair(torch.zeros(len(cells), 1, dtype=torch.float64))
        return cells + 0.0 * nothing[:, 0]


class OnMesh(BackendConformance):
    """With the pair of layers beside a model of one parameter."""

    workbench = MeshWorkbench
    lengths = FEWER


class TestTensor(OnMesh):
    """Two ranks, which cut the model; and two such pairs with different samples."""

    backend = "pytorch-ddp"
    sizes = (2, 4)
    options = TENSOR


class TestShardedTensor(OnMesh):
    """Shards of the parts."""

    backend = "fsdp"
    sizes = (4,)
    options = TENSOR


class TestPipeline(OnMesh):
    """Two stages; and two such pairs with different samples."""

    backend = "pytorch-ddp"
    sizes = (2, 4)
    options = PIPELINE


class TestShardedPipeline(OnMesh):
    """Stages whose parameters are sharded."""

    backend = "fsdp"
    sizes = (4,)
    options = PIPELINE
