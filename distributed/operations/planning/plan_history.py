"""The error of predictions over all runs of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.errors import UserError
from distributed.interfaces.history import History as RunHistory
from distributed.operations.planning.quantities import memory_text, seconds_text
from distributed.operations.report.runs import Run
from distributed.operations.report.stitch import find_runs, read_runs
from distributed.planner.estimates.comparison import Comparison, compare, kendall_tau

__all__ = ["History", "comparisons_of", "error_text", "history_of", "lines_of", "quantity"]

_FIELDS = ("step_seconds", "memory_bytes")


@dataclass(frozen=True)
class History:
    """Predicted and measured numbers of runs.

    Attributes:
        rows: (run, its split, what was compared).
        unplanned: number of runs without a plan, or that trained with another split.
    """

    rows: list[tuple[Run, str, list[Comparison]]]
    unplanned: int

    def errors(self, what: str) -> list[float]:
        """Errors of ``step time`` or ``memory``."""
        found = [c.error for _, _, comparisons in self.rows for c in comparisons if c.what == what]
        return [error for error in found if error is not None]

    @property
    def order(self) -> float | None:
        """Kendall's tau of predicted and measured step times."""
        found = [c for _, _, comparisons in self.rows for c in comparisons if c.what == "step time"]
        return kendall_tau([(c.predicted, c.measured) for c in found if c.measured is not None])


def comparisons_of(run: Run) -> list[Comparison]:
    """What a plan predicted for `run`, beside what it measured; empty without a plan."""
    planned = {name: run.setting(f"planned.{name}") for name in _FIELDS}
    logs = [line["figures"] for line in run.kept("log")]
    batch = int((run.place.get("batch") or {}).get("global_batch_size") or 0)
    return compare(planned, logs, batch)


def history_of(folder: Path) -> History:
    """All runs below `folder`.

    Raises:
        UserError: there is none.
    """
    rows, unplanned = [], 0
    for found_in in find_runs(folder):
        for run in read_runs(found_in):
            found = comparisons_of(run)
            unplanned += not found
            if found:
                rows.append((run, str(run.setting("planned.split") or ""), found))
    if not rows and not unplanned:
        raise UserError(
            "no run has left a record here",
            field="--history",
            got=str(folder),
            allowed="a folder above checkpoint_dir or tracking.record_dir of runs",
            remedy="Check the path",
        )
    return History(rows, unplanned)


def lines_of(planned: Mapping[str, Any], history: RunHistory) -> list[str]:
    """What a run prints at its end about the predictions of its plan; nothing without any.

    Args:
        planned: fields of the section `planned`.
    """
    batch = history.batch.get("global_batch_size", 0)
    found = [c for c in compare(planned, history.logs, batch) if c.measured is not None]
    return [
        f"plan: {c.what} {quantity(c, c.measured)}, predicted {quantity(c, c.predicted)} ({error_text(c)})"
        for c in found
    ]


def quantity(comparison: Comparison, value: float | None) -> str:
    """`value` with the unit of what is compared; empty if it is not known."""
    text = seconds_text if comparison.what == "step time" else memory_text
    return "" if value is None else text(value)


def error_text(comparison: Comparison) -> str:
    """``+3.2%``: predicted more than measured; ``not measured`` without a measurement."""
    return "not measured" if comparison.error is None else f"{comparison.error:+.1%}"
