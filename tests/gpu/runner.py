"""The run: which checks, each in a process of its own with a time limit, and what became of them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.gpu.bootstrap import ROOT
from tests.gpu.catalog import CHECKS
from tests.gpu.checks import Check, Row, Settings, rows_of
from tests.gpu.report import page, table

__all__ = ["main"]

OUTPUT = ROOT / "build" / "gpu"
PAGE = ROOT / "docs" / "benchmarks-gpu.md"
_LEAST = 12.0
"""Seconds of the budget under which no further check is started."""
_DRY_SECONDS = 60.0, 20.0
"""Time limit of a dry run: to begin with, and for each check."""

Result = dict[str, Any]

_FACTS = """
import json, platform, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
}))
"""


class Results:
    """The rows that are known, in a JSON file that is written anew after every check.

    Attributes:
        rows: row name -> name, status, value, limit, unit, seconds, detail, log, command.
        facts: of the machine.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.rows, self.facts = path, dict[str, Result](), dict[str, Any]()
        self._lock = threading.Lock()
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            self.rows = {row["name"]: row for row in before["rows"] if row["status"] != "not run"}
            self.facts = before["facts"]

    def add(self, row: Row, known: Result, log: Path) -> None:
        """Take in what is known of `row`."""
        self.rows[row.name] = {
            "name": row.name,
            "status": "not run",
            "value": None,
            "limit": row.limit,
            "unit": row.unit,
            "seconds": 0.0,
            "detail": "",
            "log": str(log.relative_to(ROOT)) if log.is_relative_to(ROOT) else str(log),
            "command": f"python -m tests.gpu --only '{row.name}'",
            **known,
        }

    def write(self) -> None:
        """Write the file, the rows in the catalog's order."""
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"facts": self.facts, "rows": self.ordered()}, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")

    def ordered(self) -> list[Result]:
        """The rows in the catalog's order."""
        return [self.rows[row.name] for _, row in rows_of(CHECKS) if row.name in self.rows]


def run_checks(checks: list[Check], setting: Settings, results: Results, seconds: float) -> None:
    """Run `checks` in one process that is ended after `seconds`, and note every row."""
    log = results.path.parent / "logs" / f"{checks[0].name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        notes = Path(folder, "notes.jsonl")
        started = time.monotonic()
        code = _run_process(checks, setting, notes, log, seconds)
        spent = time.monotonic() - started
        known = {note["name"]: note for note in _read(notes)}
    for _, row in rows_of(checks):
        results.add(row, known.get(row.name) or _lost(code, seconds, spent), log)


def _run_process(
    checks: list[Check], setting: Settings, notes: Path, log: Path, seconds: float
) -> int | None:
    """Exit code; None when it was ended."""
    names = [check.name for check in checks]
    command = [sys.executable, "-m", "tests.gpu.worker", json.dumps(setting.as_dict()), str(notes), *names]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**({"OMP_NUM_THREADS": "1"} if setting.dry_run else {}), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Ranks have sessions of their own and end with the process that started them.
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(notes: Path) -> list[Result]:
    if not notes.exists():
        return []
    return [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]


def _lost(code: int | None, seconds: float, spent: float) -> Result:
    """What is known of a row whose process ended before it."""
    if code is None:
        why = f"no result within {seconds:.0f} s"
    elif code < 0:
        why = f"the process was ended by {signal.Signals(-code).name}"
    else:
        why = f"the process ended with exit code {code}"
    return {"status": "error", "detail": why, "seconds": round(spent, 1)}


def _selected(only: Sequence[str], done: Sequence[str]) -> list[Check]:
    """Checks of which a row matches `only` and is not in `done`."""
    found = []
    for check in CHECKS:
        names = [row.name for row in check.rows]
        wanted = not only or any(fnmatch(name, glob) for name in (check.name, *names) for glob in only)
        if wanted and not set(names) <= set(done):
            found.append(check)
    return found


def run_all(checks: list[Check], setting: Settings, results: Results, budget: float, jobs: int = 1) -> None:
    """Run every check while the budget lasts: `jobs` side by side, then those that measure time.

    A dry run takes one process for all, which saves starts.
    """
    deadline = time.monotonic() + budget
    if setting.dry_run and checks:
        limit = _DRY_SECONDS[0] + _DRY_SECONDS[1] * len(checks)
        run_checks(checks, setting, results, min(budget, limit))
        results.write()
        return

    def run(check: Check) -> None:
        left = deadline - time.monotonic()
        if left < _LEAST:
            for row in check.rows:
                results.add(row, {"detail": "the time budget was spent"}, results.path)
        else:
            print(f"{check.name} ...", flush=True)
            run_checks([check], setting, results, min(check.seconds, left))
        results.write()

    if jobs > 1:
        # The longest first, so that none is left over.
        together = sorted((check for check in checks if not check.alone), key=lambda check: -check.seconds)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, together))
        checks = [check for check in checks if check.alone]
    for check in checks:
        run(check)


def _facts() -> dict[str, Any]:
    # In a process of its own: this one shall not take up memory on a GPU.
    found = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(found.stdout)
    return facts


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Test and measure on GPUs.")
    add = parser.add_argument
    add("--dry-run", action="store_true", help="small sizes on the CPU; skips rows that need a GPU")
    add("--only", action="append", default=[], metavar="GLOB", help="rows to run; repeatable")
    add("--budget", type=float, default=3600.0, metavar="SECONDS", help="for the whole run")
    add("--jobs", type=int, default=1, metavar="NUMBER", help="checks side by side; timed ones run alone")
    add("--resume", action="store_true", help="keep the rows that --output already has")
    add("--output", type=Path, metavar="PATH", help="JSON file; build/gpu/results.json or dry-run.json")
    add("--scratch", metavar="FOLDER", help="for checkpoints; a temporary folder when left out")
    add("--markdown", type=Path, nargs="?", const=PAGE, metavar="PATH", help="page; docs/benchmarks-gpu.md")
    add("--list", action="store_true", help="print the rows and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 when no row failed, 1 when one failed or errored, 2 without a GPU."""
    args = build_parser().parse_args(arguments)
    # Ended as by Ctrl-C, so that the check in progress ends, too, and does not disturb the next one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.list:
        print("\n".join(row.name for check in _selected(args.only, []) for row in check.rows))
        return 0
    output = args.output or OUTPUT / ("dry-run.json" if args.dry_run else "results.json")
    results = Results(output.resolve(), args.resume)
    checks = _selected(args.only, list(results.rows))
    if checks:
        results.facts = {} if args.dry_run else _facts()
    if checks and not args.dry_run and not results.facts["gpus"]:
        print("no CUDA device is visible; --dry-run runs small sizes on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-scratch-") as temporary:
        device, num_gpus = "cpu" if args.dry_run else "cuda", len(results.facts.get("gpus", []))
        kept = str(results.path.parent)
        setting = Settings(device, num_gpus, args.dry_run, args.scratch or temporary, kept)
        run_all(checks, setting, results, args.budget, args.jobs)
    rows = results.ordered()
    print(table(rows))
    if args.markdown is not None:
        args.markdown.write_text(page(rows, results.facts), encoding="utf-8")
    return 1 if any(row["status"] in ("fail", "error") for row in rows) else 0
