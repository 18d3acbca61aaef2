"""Check this machine, its installation and the hosts of a run for known problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at, e.g. ``import name``.
        status: ``ok``; ``warn`` where training works and may disappoint; ``error`` where it fails.
        message: what was found, on one line.
        remedy: what to do about it, empty when there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "error"]
    message: str
    remedy: str = ""
