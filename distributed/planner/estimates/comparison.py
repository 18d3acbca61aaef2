"""Predicted beside measured: what a run with a plan shows of the error of its predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Comparison", "compare", "kendall_tau"]

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Comparison:
    """One predicted number of a run.

    Attributes:
        what: ``step time``, in seconds, or ``memory``, in bytes.
        predicted: by the plan.
        measured: by the run; None where the run does not show it.
    """

    what: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``; None without a measurement."""
        return None if not self.measured else self.predicted / self.measured - 1.0


def compare(
    planned: Mapping[str, Any], logs: Sequence[Mapping[str, float]], global_batch: int
) -> list[Comparison]:
    """What `planned` predicted, beside the log records of a run.

    The first record is left out where there are others: it has the start of the run. The memory is the peak
    that the allocator of a GPU reports; on CPU it does not show.

    Args:
        planned: fields of the section `planned` of the configuration.
        logs: log records with ``samples_per_second``, and ``memory_peak_mb`` on a GPU.
        global_batch: samples of an optimizer step.
    """
    later = logs[1:] or logs
    rates = [log["samples_per_second"] for log in later if log.get("samples_per_second", 0.0) > 0.0]
    peaks = [log["memory_peak_mb"] for log in logs if math.isfinite(log.get("memory_peak_mb", math.nan))]
    found = []
    if planned.get("step_seconds"):
        seconds = global_batch / median(rates) if rates else None
        found.append(Comparison("step time", float(planned["step_seconds"]), seconds))
    if planned.get("memory_bytes"):
        peak = max(peaks) * _MEBIBYTE if peaks else None
        found.append(Comparison("memory", float(planned["memory_bytes"]), peak))
    return found


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-a of (predicted, measured): concordant minus discordant pairs, over all pairs; None for
    fewer than two. Source: Kendall, 1938 (doi:10.1093/biomet/30.1-2.81)."""
    signs = [
        math.copysign(1.0, (a[0] - b[0]) * (a[1] - b[1])) if a[0] != b[0] and a[1] != b[1] else 0.0
        for i, a in enumerate(pairs)
        for b in pairs[:i]
    ]
    return sum(signs) / len(signs) if signs else None
