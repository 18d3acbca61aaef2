"""The backends with several axes pass the kit on a mesh, too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distributed.testing.conformance import BackendConformance
from distributed.testing.contracts.step import StepContracts
from tests.contracts.mesh_workbenches import MeshWorkbench, OnSlices

FEWER = range(1, 14)
TENSOR: Mapping[str, Any] = MappingProxyType({"parallel.tensor": 2})
PIPELINE: Mapping[str, Any] = MappingProxyType({"parallel.pipeline": 2, "parallel.schedule": "gpipe"})


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


class TestSlices(OnSlices, StepContracts):
    """Two slices of each sequence; `tests/campaigns/mesh_conformance.py` has the other contracts."""

    backend = "pytorch-ddp"
    sizes = (2,)
