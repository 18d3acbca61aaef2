"""Predicted beside measured step times of real runs on this machine.

    python -m tests.benchmarks.planner_machine                  # calibrates, and measures the 20 test rows
    python -m tests.benchmarks.planner_machine --rows build     # the rows with which the model was built
    python -m tests.benchmarks.planner_machine --profile FILE   # with a profile that was measured before

Nothing else should run on the machine. Each row is a run of the Trainer; its time is the median of steps on
rank 0. All predictions are made before the first run, from the model object and the profile alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from statistics import mean

from distributed.operations.planning.calibrate import calibrate, default_ranks, write_profile
from distributed.operations.planning.collect_facts import facts_source
from distributed.planner.estimates.comparison import kendall_tau
from distributed.planner.estimates.facts_time import FactsTimer
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.model_facts import FactsSource
from distributed.planner.estimates.time import TimeParts
from tests.benchmarks.planner_machine_rows import BUILD, TEST
from tests.support.timed_models import TimedRun, batch_of, build, measured_seconds

__all__ = ["predict"]

_STEPS = 12


def predict(run: TimedRun, profile: HardwareProfile, sources: dict[object, FactsSource]) -> TimeParts:
    """Predicted parts of a step.

    Args:
        sources: of models that were seen before.
    """
    key = run.kind, run.size
    if key not in sources:
        sources[key] = facts_source(build(*key), batch_of(*key, 2))
    return FactsTimer(sources[key], profile).parts(run.split)


def main() -> None:
    """Print a row for each run, the mean error and the order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", choices=["build", "test"], default="test")
    parser.add_argument("--profile", help="a profile of this machine; measured otherwise")
    parser.add_argument("--only", default="", help="part of the names of rows")
    parser.add_argument("--save", help="where to write the measured profile")
    parser.add_argument("--measured", help="seconds that --json has written, instead of runs")
    parser.add_argument("--json", help="where to write the measured seconds, with those of each phase")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.profile:
        profile = load_profile(args.profile)
    else:
        profile = calibrate(default_ranks(0), device="cpu", report=lambda text: print(text, file=sys.stderr))
        if args.save:
            write_profile(profile, Path(args.save))
    rows = [row for row in (TEST if args.rows == "test" else BUILD) if args.only in row.name]
    sources: dict[object, FactsSource] = {}
    # All of them first: a row that cannot be predicted is no reason to measure the others.
    predicted = [predict(row, profile, sources) for row in rows]
    measured: list[float] = []
    found = {}
    print("| run | measured ms | predicted ms | error | compute | exposed | bubble | optimizer |")
    print("|---|---|---|---|---|---|---|---|")
    for row, parts in zip(rows, predicted, strict=True):
        if args.measured:
            seconds = json.loads(Path(args.measured).read_text(encoding="utf-8"))[row.name]["seconds"]
        else:
            seconds, phases = measured_seconds(row, _STEPS)
            found[row.name] = {"seconds": seconds, **phases}
        measured.append(seconds)
        own = (parts.compute, parts.exposed_communication, parts.bubble, parts.optimizer)
        cells = [f"{value * 1e3:.0f}" for value in (seconds, parts.total)]
        cells += [f"{parts.total / seconds - 1:+.1%}", *(f"{value * 1e3:.0f}" for value in own)]
        print("| " + " | ".join([row.name, *cells]) + " |", flush=True)
    totals = [parts.total for parts in predicted]
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    errors = [abs(p / m - 1) for p, m in zip(totals, measured, strict=True)]
    print(f"mean error {mean(errors):.1%}, largest {max(errors):.1%}", end="")
    print(
        f", Kendall tau {kendall_tau(list(zip(totals, measured, strict=True))):.2f}" if len(rows) > 1 else ""
    )


if __name__ == "__main__":
    main()
