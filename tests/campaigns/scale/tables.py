"""The results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.campaigns.scale.growth import growth_of
from tests.campaigns.scale.inventory import Item

__all__ = ["inventory_table", "measured_table", "seconds_table", "simulated_table"]

Found = Mapping[int, Mapping[str, float]]


def inventory_table(inventory: Sequence[Item]) -> str:
    """What depends on the number of ranks."""
    rows = [(i.what, f"`{i.code}`", i.when, i.who, _order(i.growth), i.reason) for i in inventory]
    return _table(("cost", "code", "each", "paid by", "growth", "reason"), rows)


def simulated_table(inventory: Sequence[Item], found: Found) -> str:
    """Counts by number of ranks, and their growth."""
    rows = []
    for item in inventory:
        values = {size: costs[item.name] for size, costs in found.items()}
        growth = _order(growth_of(values)) if len(values) > 1 else ""
        rows.append((item.what, item.when, item.who, *map(_number, values.values()), item.unit, growth))
    return _table(("cost", "each", "paid by", *map(_number, found), "unit", "growth"), rows)


def measured_table(found: Found) -> str:
    """Everything that real runs of several sizes have in common or not."""
    names = dict.fromkeys(name for costs in found.values() for name in costs)
    rows = [(name, *(_number(costs.get(name)) for costs in found.values())) for name in names]
    return _table(("measured", *map(_number, found)), rows)


def seconds_table(found: Found) -> str:
    """CPU seconds by number of ranks."""
    names = [name for name in next(iter(found.values())) if name.endswith((" seconds", " MiB", " threads"))]
    rows = [(name, *(_number(costs[name]) for costs in found.values())) for name in names]
    return _table(("CPU seconds, threads, memory", *map(_number, found)), rows)


def _order(growth: str) -> str:
    return f"O({growth})"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
