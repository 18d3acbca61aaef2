"""The layout of each backend whose memory is predicted."""

from __future__ import annotations

from distributed.planner.estimates.layout import Buckets, Layout
from distributed.planner.estimates.sharded_layout import ShardedUnits
from distributed.planner.estimates.zero_layout import ZeroStages

__all__ = ["LAYOUTS"]

LAYOUTS: dict[str, type[Layout]] = {
    "serial": Layout,
    "pytorch-ddp": Buckets,
    "fsdp": ShardedUnits,
    "deepspeed": ZeroStages,
}
"""Name of a backend -> how it divides a model."""
