"""Check this machine, its installation and the hosts of a run for known problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: name of the check, e.g. ``import name``.
        status: ``ok``; ``warn`` where training works and may disappoint; ``error`` where it fails.
        message: result on one line.
        remedy: remedy, empty when none is needed.
    """

    name: str
    status: Literal["ok", "warn", "error"]
    message: str
    remedy: str = ""
