"""The whole conformance kit where ranks divide sequences or experts.

    python -m pytest tests/campaigns/mesh_conformance.py

CI runs its contracts of a step over slices (`tests/contracts/test_mesh_conformance.py`), and the whole kit on
the other axes.
"""

from __future__ import annotations

from distributed.testing.conformance import BackendConformance
from tests.contracts.mesh_workbenches import OnExperts, OnSlices

FEWER = range(1, 14)


class TestSlices(OnSlices, BackendConformance):
    """Two slices of each sequence; and two such pairs with different samples."""

    backend = "pytorch-ddp"
    sizes = (2, 4)
    lengths = FEWER


class TestShardedSlices(OnSlices, BackendConformance):
    """Ranks that shard the model, beside slices."""

    backend = "fsdp"
    sizes = (4,)
    lengths = FEWER


class TestExperts(OnExperts, BackendConformance):
    """Two ranks that divide experts; and three such pairs."""

    backend = "pytorch-ddp"
    sizes = (2, 6)
    lengths = FEWER


class TestShardedExperts(OnExperts, BackendConformance):
    """Ranks that shard the rest of the model."""

    backend = "fsdp"
    sizes = (2, 6)
    lengths = FEWER
