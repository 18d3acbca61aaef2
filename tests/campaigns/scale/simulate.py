"""The whole simulation, and what in it grows faster than it is declared to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.campaigns.scale.checkpoint_costs import checkpoint_costs
from tests.campaigns.scale.growth import exceeds, growth_of
from tests.campaigns.scale.host_costs import heartbeat_costs, host_costs
from tests.campaigns.scale.inventory import Item
from tests.campaigns.scale.loop_costs import loop_costs

__all__ = ["find_excess", "simulate"]


def simulate(size: int, seconds: float = 3.0) -> dict[str, float]:
    """Costs of `size` ranks by the names of the inventory, and CPU seconds.

    Args:
        seconds: how long to measure the CPU time of heartbeats.
    """
    return {
        **loop_costs(size),
        **host_costs(size),
        **heartbeat_costs(size, seconds),
        **checkpoint_costs(size),
    }


def find_excess(inventory: Sequence[Item], found: Mapping[int, Mapping[str, float]]) -> list[str]:
    """What grows faster than declared, one line each.

    Args:
        found: number of ranks -> name -> count, for at least two numbers of ranks.
    """
    lines = []
    for item in inventory:
        values = {size: costs[item.name] for size, costs in found.items()}
        growth = growth_of(values)
        if exceeds(growth, item.growth):
            lines.append(
                f"{item.name} ({item.code}) grows like {growth}, declared is {item.growth}: {values}"
            )
    return lines
