"""Checks that fail in every way there is, for the tests of the program."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator

from tests.gpu.checks import Check, Measured, Row, Settings, Skipped

__all__ = ["CHECKS", "declines", "dies", "hangs", "raises", "values"]


def values(setting: Settings) -> Iterator[Measured]:
    """One row within its limit, one beyond, two that are not numbers."""
    yield Measured(1.0, "one")
    yield Measured(2.0, "two")
    yield Measured(math.nan, "nan")
    yield Measured(math.nan, "nan")


def raises(setting: Settings) -> Iterator[Measured]:
    """An exception behind the first row."""
    yield Measured(1.0)
    raise ValueError("first line\nsecond line")


def declines(setting: Settings) -> Iterator[Measured]:
    """A row that cannot run here."""
    raise Skipped("not here")
    yield Measured(0.0)


def dies(setting: Settings) -> Iterator[Measured]:
    """The process aborts behind the first row, as at an error of a device."""
    yield Measured(1.0)
    os.abort()


def hangs(setting: Settings) -> Iterator[Measured]:
    """Nothing more behind the first row."""
    yield Measured(1.0)
    time.sleep(600)


CHECKS = [
    Check(
        f"probe/{name}",
        f"tests.gpu.probes:{name}",
        tuple(Row(f"probe/{name}/{number}", "x", 1.0, "") for number in range(2)),
    )
    for name in ("dies", "hangs")
]
