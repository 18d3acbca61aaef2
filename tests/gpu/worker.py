"""One process of the run: some checks in turn, every row written down as soon as it is known."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.bootstrap import make_importable
from tests.gpu.catalog import CHECKS
from tests.gpu.checks import NEEDS_GPU, NOT_DRY, Check, Measured, Row, Settings, Skipped, decide
from tests.gpu.probes import CHECKS as PROBES

__all__ = ["main"]


class Notes:
    """A file with one JSON object a line: what is known of each row."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, row: Row, status: str, seconds: float, **known: Any) -> None:
        """Note what became of `row`."""
        line = {"name": row.name, "status": status, "seconds": round(seconds, 3), **known}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run_check(check: Check, setting: Settings, notes: Notes) -> None:
    """Run `check`; whatever it raises becomes the status of the rows that it still owes."""
    rows, mark = list(check.rows), time.perf_counter()
    print(f"== {check.name}", flush=True)
    try:
        _require(check, setting)
        for found in _measured(check, setting):
            row, now = rows.pop(0), time.perf_counter()
            _note(row, found, notes, now - mark)
            mark = now
    except Skipped as reason:
        for row in rows:
            notes.write(row, "skipped", time.perf_counter() - mark, detail=str(reason))
    except BaseException as error:  # noqa: BLE001 - one check must not take the others along
        traceback.print_exc()
        for row in rows:
            notes.write(row, "error", time.perf_counter() - mark, detail=_one_line(error))
            mark = time.perf_counter()


def _measured(check: Check, setting: Settings) -> Iterator[Measured]:
    module, _, name = check.target.partition(":")
    yield from getattr(import_module(module), name)(setting, **check.options)


def _require(check: Check, setting: Settings) -> None:
    if setting.device == "cpu" and all(row.gpu_only for row in check.rows):
        raise Skipped(NEEDS_GPU)
    if setting.dry_run and not check.dry:
        raise Skipped(NOT_DRY)
    missing = [name for name in check.requires if find_spec(name) is None]
    if missing:
        raise Skipped(f"{', '.join(missing)} is not installed")


def _note(row: Row, found: Measured, notes: Notes, seconds: float) -> None:
    if found.skipped is not None:
        notes.write(row, "skipped", seconds, detail=found.skipped)
    else:
        notes.write(row, decide(row, found.value), seconds, value=float(found.value), detail=found.detail)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def main(settings: str, output: str, names: list[str]) -> None:
    """Run the checks called `names`."""
    faulthandler.enable()
    setting, notes = Settings(**json.loads(settings)), Notes(Path(output))
    chosen = {check.name: check for check in (*CHECKS, *PROBES)}
    try:
        for name in names:
            run_check(chosen[name], setting, notes)
    finally:
        if "tests.gpu.ranks" in sys.modules:
            sys.modules["tests.gpu.ranks"].close_pool()


if __name__ == "__main__":
    make_importable()
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
