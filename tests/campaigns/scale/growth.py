"""How a count grows with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["CLASSES", "exceeds", "growth_of"]

CLASSES = ("1", "log N", "N", "N^2")
"""Kinds of growth, slowest first."""
_SLACK = 1.25
"""Factor by which a count may exceed its kind: numbers of ranks have more digits."""


def growth_of(values: Mapping[int, float]) -> str:
    """The slowest of `CLASSES` that the two largest numbers of ranks allow.

    Args:
        values: number of ranks -> count, for at least two numbers.
    """
    low, high = sorted(values)[-2:]
    if values[high] <= values[low] * _SLACK:
        return "1"
    ratio = values[high] / max(values[low], 1.0)
    limits = (1.0, math.log2(high) / math.log2(low), high / low, (high / low) ** 2)
    return next(
        (name for name, limit in zip(CLASSES, limits, strict=True) if ratio <= limit * _SLACK), "more"
    )


def exceeds(found: str, declared: str) -> bool:
    """Whether the kind `found` grows faster than the one that is `declared`."""
    order = (*CLASSES, "more")
    return order.index(found) > order.index(declared)
