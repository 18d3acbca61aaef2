"""Profiles with curves on which a byte or an operation takes a nanosecond."""

from __future__ import annotations

from typing import Any

from distributed.communication.collective_costs import OPERATIONS
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.measured_node import MeasuredNode, MeasuredRanks
from distributed.planner.estimates.work_facts import MEASURED_KINDS

__all__ = ["linear_profile", "linear_ranks"]

_HOST = ("forward_seconds", "backward_seconds", "update_seconds", "replica_seconds")
LINE = ((1.0, 1e-9), (1e12, 1e3))


def linear_ranks(sizes: tuple[int, ...] = (2, 4, 8), **given: Any) -> MeasuredRanks:
    """Ranks of groups of `sizes`, whose host takes no time and whose communication nothing hides."""
    values = {"threads": 1, **dict.fromkeys(_HOST, 0.0), **given}
    return MeasuredRanks(
        operations=dict.fromkeys(MEASURED_KINDS, LINE),
        collectives={name: dict.fromkeys(sizes, LINE) for name in OPERATIONS},
        **values,
    )


def linear_profile(**given: Any) -> HardwareProfile:
    """Eight ranks in a node."""
    node = MeasuredNode(cores=8, ranks={8: linear_ranks(**given)})
    return load_profile("CPU").model_copy(update={"measured": node, "devices_per_node": 8})
