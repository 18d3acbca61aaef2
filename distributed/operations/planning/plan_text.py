"""The table of plans as text, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from distributed.errors import listed
from distributed.operations.planning.plans import Plans
from distributed.operations.planning.quantities import memory_text, seconds_text
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.search import Ranked
from distributed.planner.estimates.time import TimeParts

__all__ = ["HEADS", "headline", "part_rows", "rows_of", "settings_of", "uncertainty"]

HEADS = ["#", "backend", "ranks", "micro-batch", "settings", "step", "interval", "MFU", "memory", "of device"]


def headline(plans: Plans) -> str:
    """What was planned, in a line."""
    space, profile = plans.space, plans.profile
    return (
        f"{plans.subject}; {space.world_size} x {profile.name}, {plans.precision}, {space.optimizer},"
        f" global batch {space.sizes.global_batch}"
    )


def rows_of(plans: Plans) -> Iterator[list[str]]:
    """A row for each plan."""
    for index, row in enumerate(plans.rows, 1):
        yield _row(index, row, plans)


def _row(index: int, row: Ranked, plans: Plans) -> list[str]:
    split, profile = row.split, plans.profile
    low, high = plans.intervals(row)["time"]
    micro = f"{split.micro_batch} x {split.num_micro_batches}"
    return [
        str(index),
        split.backend,
        str(split.dims),
        micro,
        settings_of(row),
        seconds_text(row.time.total),
        f"{seconds_text(low)} to {seconds_text(high)}",
        f"{row.mfu:.1%}",
        memory_text(row.memory.total),
        f"{row.memory.total / profile.memory:.0%}",
    ]


def uncertainty(plans: Plans) -> str | None:
    """Which plans may need more memory than there is; None without."""
    numbers = plans.uncertain
    if not numbers:
        return None
    return (
        "the upper end of the interval of memory is above the device's for"
        f" plan{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
    )


def settings_of(row: Ranked) -> str:
    """What else the plan sets: ``zero 2, recompute``."""
    split = row.split
    named = {
        f"zero {split.zero_stage}": split.zero_stage,
        split.schedule: split.dims.pipeline > 1,
        "recompute": split.activation_checkpointing,
        "offload": split.offload,
        split.codec: split.codec != "none",
    }
    return ", ".join(name for name, holds in named.items() if holds)


def part_rows(plans: Plans, index: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    """(parts of the step's time, parts of the memory), each (name, value, share)."""
    row = plans[index]
    intervals = plans.intervals(row)
    low, high = intervals["mfu"]
    time = _parts(row.time, seconds_text, intervals["time"])
    mfu = [["MFU", f"{row.mfu:.1%}", ""], ["  interval", f"{low:.1%} to {high:.1%}", ""]]
    return [*time, *mfu], _parts(row.memory, memory_text, intervals["memory"])


def _parts(
    parts: TimeParts | MemoryParts, text: Callable[[float], str], interval: tuple[float, float]
) -> list[list[str]]:
    found = [(field.name, getattr(parts, field.name)) for field in fields(parts)]
    whole = parts.total or 1
    rows = [[name.replace("_", " "), text(value), f"{value / whole:.1%}"] for name, value in found]
    low, high = map(text, interval)
    return [*rows, ["total", text(parts.total), ""], ["  interval", f"{low} to {high}", ""]]
