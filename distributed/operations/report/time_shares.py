"""Time by phase, of log steps and of whole runs."""

from __future__ import annotations

import math

from distributed.operations.report.runs import Attempt, Run, Series

PHASES = ("data", "forward", "backward", "communication", "optimizer", "save", "validation", "other")
"""In the order in which they are stacked; ``other`` is the unexplained rest."""


def over_steps(run: Run) -> dict[str, Series]:
    """Percent of each log interval by phase; empty when the run logged no phases.

    Validation and the save at the end of an epoch lie between two intervals: see `whole`.
    """
    found = {}
    for phase in PHASES[:-1]:
        series = run.series(f"time_{phase}")
        if any(series.values):
            found[phase] = Series(series.steps, [100.0 * max(0.0, value) for value in series.values])
    if not found:
        return {}
    steps = next(iter(found.values())).steps
    if all(series.steps == steps for series in found.values()):
        rest = [100.0 - sum(series.values[index] for series in found.values()) for index in range(len(steps))]
        found["other"] = Series(steps, [max(0.0, value) for value in rest])
    return found


def whole(run: Run) -> dict[str, float]:
    """Seconds by phase over all attempts, without the time between attempts; empty without phases."""
    total = dict.fromkeys(PHASES, 0.0)
    for attempt in run.attempts:
        _add(attempt, int(run.place.get("batch", {}).get("global_batch_size") or 0), total)
    return {phase: value for phase, value in total.items() if value > 0.0} if sum(total.values()) else {}


def _add(attempt: Attempt, global_batch_size: int, total: dict[str, float]) -> None:
    """Add an attempt's seconds. An interval lasts as long as its samples took; validation is between the
    epoch's last log line and the epoch's own, and what follows until the next interval is saving."""
    step, ended, validated = attempt.step, None, None
    for line in attempt.lines:
        if line["kind"] == "log":
            figures = line["figures"]
            rate = figures.get("samples_per_second", 0.0)
            length = (line["step"] - step) * global_batch_size / rate if rate and math.isfinite(rate) else 0.0
            _share_out(figures, length, total)
            if validated is not None:
                total["save"] += max(0.0, line["time"] - length - validated)
            step, ended, validated = line["step"], line["time"], None
        elif line["kind"] == "epoch" and ended is not None:
            # Without validation the two lines are a millisecond apart.
            if any(name.startswith("val_") for name in line["figures"]):
                total["validation"] += max(0.0, line["time"] - ended)
            validated, ended = line["time"], None


def _share_out(figures: dict[str, float], length: float, total: dict[str, float]) -> None:
    shares = {phase: max(0.0, figures.get(f"time_{phase}", 0.0)) for phase in PHASES[:-1]}
    if not any(shares.values()):
        return
    for phase, share in shares.items():
        total[phase] += share * length
    total["other"] += max(0.0, 1.0 - sum(shares.values())) * length
