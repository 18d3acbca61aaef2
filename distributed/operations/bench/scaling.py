"""Strong and weak scaling: throughput by the number of ranks, interleaved repeats, with their spread."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from distributed.errors import UserError
from distributed.operations.report.stitch import read_runs

_INTERVALS = 6
"""Log intervals per run; the first is the warm-up and does not count."""
_CAUSE = re.compile(r"error: |rank \d+ \(")


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement.

    Attributes:
        ranks: ascending; the first is what efficiency is measured against.
        modes: any of ``strong`` and ``weak``.
        batch_size: samples per rank on the fewest ranks.
        steps: optimizer steps per run.
        repeats: runs of each case.
        script: user's script, None for the bundled network.
        options: further words for ``train``.
    """

    backends: Sequence[str]
    ranks: Sequence[int]
    modes: Sequence[str]
    batch_size: int
    steps: int
    repeats: int
    script: Path | None = None
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Case:
    """One setting: a backend on so many ranks, with so many samples each."""

    backend: str
    ranks: int
    batch_size: int


@dataclass(frozen=True)
class Figure:
    """Repeats of one measurement: median and spread."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass
class Result:
    """One row of the table.

    Attributes:
        mode: ``strong`` or ``weak``.
        throughput: samples per second.
        efficiency: per rank, against the fewest ranks in the same repeat: 1 is perfect.
    """

    case: Case
    mode: str
    throughput: Figure
    efficiency: Figure = field(default_factory=lambda: Figure((math.nan,)))


def cases_of(plan: Plan) -> dict[tuple[str, str, int], Case]:
    """(backend, mode, ranks) -> what to run; modes share what is the same run.

    Raises:
        UserError: the global batch of strong scaling is not divisible by a number of ranks.
    """
    fewest, found = plan.ranks[0], {}
    for backend in plan.backends:
        for mode in plan.modes:
            for ranks in plan.ranks:
                share, rest = divmod(plan.batch_size * fewest, ranks)
                if mode == "strong" and (rest or not share):
                    whole = plan.batch_size * fewest
                    raise UserError(
                        f"global batch {whole} is not divisible by {ranks} ranks",
                        field="--batch-size",
                        got=plan.batch_size,
                        allowed=f"multiples of {math.lcm(*plan.ranks) // fewest}",
                    )
                found[backend, mode, ranks] = Case(
                    backend, ranks, share if mode == "strong" else plan.batch_size
                )
    return found


def measure(plan: Plan, report: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Run every case `plan.repeats` times, interleaved, so that background load affects all cases
    equally.

    Args:
        report: called with a line about each run.

    Raises:
        UserError: a run failed; holds the line with the cause.
    """
    rows = cases_of(plan)
    cases = list(dict.fromkeys(rows.values()))
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    for repeat in range(plan.repeats):
        for case in cases:
            rate, fits = _run(plan, case)
            rates[case].append(rate)
            report(
                f"{repeat + 1}/{plan.repeats}  {case.backend}, {case.ranks} x {case.batch_size}:"
                f" {rate:,.0f} samples/s{f' in the last of {fits} trainings' if fits > 1 else ''}"
            )
    return list(_results(plan, rows, rates))


def _results(
    plan: Plan, rows: dict[tuple[str, str, int], Case], rates: dict[Case, list[float]]
) -> Iterator[Result]:
    for (backend, mode, ranks), case in rows.items():
        base = rates[rows[backend, mode, plan.ranks[0]]]
        shares = [
            rate / ranks / (alone / plan.ranks[0]) for rate, alone in zip(rates[case], base, strict=True)
        ]
        yield Result(case, mode, Figure(tuple(rates[case])), Figure(tuple(shares)))


def _run(plan: Plan, case: Case) -> tuple[float, int]:
    """Samples per second of one run, in processes of its own, and how many trainings it was."""
    script = plan.script or Path(__file__).parents[2] / "commands" / "bundled" / "random_network.py"
    with TemporaryDirectory(prefix="scaling-") as folder:
        command = [
            *(sys.executable, "-m", "distributed.cli", "train", "--script", str(script)),
            *("--backend", case.backend, "--num-processes", str(case.ranks)),
            *("--batch-size", str(case.batch_size), "--max-steps", str(plan.steps)),
            *("--log-every-n-steps", str(max(1, plan.steps // _INTERVALS)), "--record-dir", folder),
            *plan.options,
            *(["--", *plan.arguments] if plan.arguments else []),
        ]
        # As many threads as ranks get on a host of their own would compare threads, not ranks.
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            cause = _cause(done.stderr) or _cause(done.stdout) or f"exit code {done.returncode}"
            raise UserError(
                f"{case.backend} on {case.ranks} ranks failed: {cause}",
                remedy=f"Rerun it to see the full output: {shlex.join(command[1:])}",
            )
        return _rate(Path(folder))


def _cause(said: str) -> str:
    """The line of a failed run's output with the cause; empty without any."""
    lines = said.strip().splitlines()
    # A rank's traceback follows the line that names it; a script's own ends with its error.
    return next((line for line in reversed(lines) if _CAUSE.match(line)), lines[-1] if lines else "")


def _rate(folder: Path) -> tuple[float, int]:
    *earlier, run = read_runs(folder)
    series = run.series("samples_per_second")
    steps = [b - a for a, b in zip(series.steps, series.steps[1:], strict=False)]
    if not steps:
        raise UserError(
            "the run was too short to be measured: it logged only once",
            field="--steps",
            got=series.steps[-1] if series.steps else 0,
            remedy="Use more steps or more samples",
        )
    seconds = sum(number / rate for number, rate in zip(steps, series.values[1:], strict=True))
    return sum(steps) / seconds, len(earlier) + 1
