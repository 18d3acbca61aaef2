"""Human-readable numbers, times and settings."""

from __future__ import annotations

import math
import time
from typing import Any

from distributed.redaction import redact_text

_UNITS = {
    "samples_per_second": "samples/s",
    "memory": "MiB",
    "gpu_utilisation": "%",
    "time": "%",
    "accuracy": "%",
    "exposed_communication_seconds": "s",
}
_LABELS = {
    "loss": "Training loss",
    "train_loss": "Training loss, epoch mean",
    "val_loss": "Validation loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples_per_second": "Throughput",
    "gpu_utilisation": "GPU utilisation",
    "exposed_communication_seconds": "Exposed communication per step",
    "hidden_communication_share": "Hidden share of communication",
    "memory_rss_mb": "resident",
    "memory_allocated_mb": "allocated on the device",
    "memory_reserved_mb": "reserved on the device",
    "memory_peak_mb": "peak on the device",
}


def number(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits: ``6,674``, ``0.4115``, ``2e-05``."""
    if not math.isfinite(value):
        return {True: "NaN", False: "infinite"}[math.isnan(value)]
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def with_unit(name: str, value: float) -> str:
    """The metric `name` with its unit; accuracies in percent."""
    unit = unit_of(name)
    if name.endswith("accuracy") and unit == "%":
        return f"{value * 100:.2f} %"
    return f"{number(value)} {unit}".rstrip()


def unit_of(name: str) -> str:
    """Unit of a logged metric, empty for a plain number."""
    if name.endswith("accuracy"):
        return "%"
    return _UNITS.get(name) or _UNITS.get(name.split("_")[0], "")


def label_of(name: str) -> str:
    """Title of a plot of the metric `name`."""
    if name in _LABELS:
        return _LABELS[name]
    text = name.removeprefix("val_").replace("_", " ")
    return f"Validation {text}" if name.startswith("val_") else text[:1].upper() + text[1:]


def seconds(value: float) -> str:
    """A duration: ``0.9 s``, ``4 min 10 s``, ``2 h 5 min``."""
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def moment(value: float) -> str:
    """A time of this machine's clock: ``2026-11-22 00:44:14``; empty for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else ""


def plural(count: int, word: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def cell(value: Any) -> str:
    """A value in a table: numbers to five digits, empty for None."""
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def setting(value: Any) -> str:
    """A configuration value, without secrets."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return redact_text(f"{value:g}" if isinstance(value, float) else str(value))
