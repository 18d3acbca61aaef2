"""What a check is: rows of the table, the settings it runs under, and how a row's status is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["NEEDS_GPU", "NOT_DRY", "Check", "Measured", "Row", "Settings", "Skipped", "decide", "rows_of"]

NEEDS_GPU = "needs a GPU"
NOT_DRY = "not in a dry run, where other rows run the same code"
"""Why a dry run skips a row."""


class Skipped(Exception):
    """A row that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: unique; the first part names the group.
        unit: of the value.
        limit: largest value that passes; None for a row that only reports, as every time does.
        meaning: what the value is, for the page.
        gpu_only: cannot run without a GPU.
    """

    name: str
    unit: str
    limit: float | None
    meaning: str
    gpu_only: bool = False


@dataclass(frozen=True)
class Check:
    """What one process runs: one row, or several that share their preparation.

    Attributes:
        name: of the check; rows begin with it.
        target: ``module:function`` that takes `Settings` and `options`, and yields `Measured`.
        rows: in the order in which `target` yields them.
        options: keyword arguments of `target`.
        requires: modules without which the rows are skipped.
        seconds: time limit on a GPU.
        dry: part of a dry run, too.
        alone: reports times or needs the whole GPU, so that no other check may run beside it.
    """

    name: str
    target: str
    rows: tuple[Row, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    seconds: float = 120.0
    dry: bool = True
    alone: bool = False


@dataclass(frozen=True)
class Measured:
    """The value of the next row, and what else a reader wants to know; or why there is none."""

    value: float
    detail: str = ""
    skipped: str | None = None


@dataclass(frozen=True)
class Settings:
    """Where and how large.

    Attributes:
        device: ``cuda`` or ``cpu``.
        num_gpus: visible CUDA devices.
        dry_run: small sizes, on the CPU.
        scratch: folder for checkpoints and the like.
        results: folder of the results, for files that stay; `scratch` where it is empty.
    """

    device: str
    num_gpus: int
    dry_run: bool
    scratch: str
    results: str = ""

    @property
    def folder(self) -> Path:
        """`scratch`, which exists."""
        path = Path(self.scratch)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def kept(self, name: str) -> Path:
        """Path of a file beside the results."""
        folder = Path(self.results or self.scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def pick(self, full: Any, small: Any) -> Any:
        """`full` on a GPU, `small` in a dry run."""
        return small if self.dry_run else full

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return asdict(self)


def decide(row: Row, value: float) -> str:
    """``pass`` or ``fail``; NaN fails, and a row without a limit passes."""
    return "pass" if row.limit is None or value <= row.limit else "fail"


def rows_of(checks: list[Check]) -> Iterator[tuple[Check, Row]]:
    """Every row with its check, in order."""
    for check in checks:
        for row in check.rows:
            yield check, row
