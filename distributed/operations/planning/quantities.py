"""Times and sizes of predictions as text."""

from __future__ import annotations

from distributed.operations.report.formats import number

__all__ = ["memory_text", "seconds_text"]

_DIGITS = 3


def seconds_text(value: float) -> str:
    """``1.23 s``, ``45.6 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{number(value / scale, _DIGITS)} {unit}"
    return f"{number(value * 1e6, _DIGITS)} us"


def memory_text(nbytes: float) -> str:
    """``12.3 GB``, ``45.6 MB``, of 1000 bytes each."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{number(nbytes / scale, _DIGITS)} {unit}"
    return f"{number(nbytes / 1e3, _DIGITS)} kB"
