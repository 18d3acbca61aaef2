"""Kill ranks at random moments, restart the run, and check that it ends like an uninterrupted one.

::

    python -m distributed.testing.kills --number 100 --seed 0
    python -m distributed.testing.kills --restarts 20 --ranks 3
    python -m distributed.testing.kills --runs 200 --seed 0

Real launchers, real processes, real signals; see `kill_points` for the moments and `kill_runs` for what is
compared. The seed decides the moments; an uninterrupted run counts how often each occurs. ``--runs`` takes
the scenarios of `kill_scenarios` in turn, each run with a seed of its own, by which it can be repeated.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median

from distributed.testing.kill_runs import (
    CASES,
    Kill,
    Outcome,
    Reference,
    Scenario,
    reference_of,
    run_scenario,
)
from distributed.testing.kill_scenarios import SCENARIOS, SHARES, Key, Plan, a_kill, planned, turns

__all__ = ["choose", "main", "table"]

KINDS = ("step", "save", "step", "evaluate", "save", "start", "resume", "epoch", "save", "step", "end")
"""Kinds of points in the order in which scenarios get one."""

RESUMING = (
    "start model",
    "start setup: end",
    "start: ready",
    "resume: begin",
    "resume: opened",
    "resume: engine cold",
    "resume: engine warm",
    "resume: a tensor read",
    "resume: end",
)
"""Points that a run passes between its start and its first step, in every restart."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 when any run differed from an uninterrupted one."""
    args = _parse(argv)
    results = list[tuple[Scenario, Outcome]]()
    with ExitStack() as stack, ThreadPoolExecutor(args.at_once) as pool:
        plans = _plans(args)
        distinct = {plan.same: plan.uninterrupted for plan in plans}
        references = dict(zip(distinct, pool.map(reference_of, distinct.values()), strict=True))
        for _, home in references.values():
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        known = [references[plan.same][0] for plan in plans]
        scenarios = [plan.choose(reference) for plan, reference in zip(plans, known, strict=True)]
        todo = [pool.submit(run_scenario, *pair) for pair in zip(scenarios, known, strict=True)]
        for plan, scenario, future in zip(plans, scenarios, todo, strict=True):
            results.append((scenario, future.result()))
            print(_line(plan.label, *results[-1]), flush=True)
    print(f"\n{table(results)}\n\n{_summary(results)}")
    return int(any(outcome.problems for _, outcome in results))


def _plans(args: argparse.Namespace) -> list[Plan]:
    if args.runs is not None:
        return planned(args.seed, args.runs, args.scenarios, args.backend, args.ranks)
    draw = random.Random(args.seed)
    keys = list(turns(args.backend or SHARES, args.ranks, 1 if args.restarts else args.number))
    if args.restarts:
        return [Plan("1", keys[0], lambda reference: restarts(draw, keys[0], reference, args.restarts))]
    return [Plan(f"{n + 1:3}", key, partial(choose, draw, n, key)) for n, key in enumerate(keys)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distributed.testing.kills", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--number", type=int, default=100, help="Runs to kill; default 100.")
    parser.add_argument("--runs", type=int, help="Runs of the scenarios in turn, instead of --number kills.")
    parser.add_argument(
        "--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), help="Default: all."
    )
    parser.add_argument("--seed", type=int, default=0, help="Decides the moments; default 0.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="Default 2 3.")
    parser.add_argument("--backend", nargs="+", choices=list(CASES), help=f"Default: {', '.join(SHARES)}.")
    parser.add_argument("--restarts", type=int, default=0, help="Kill one run this many times in a row.")
    parser.add_argument("--at-once", type=int, default=2, help="Runs side by side; default 2.")
    return parser.parse_args(argv)


def choose(draw: random.Random, number: int, key: Key, reference: Reference) -> Scenario:
    """The scenario with that number: one kill, or sometimes two.

    Kills while a run starts or resumes come in its second start, after one in the first; and of the
    others some come after one while the run started.
    """
    kills: tuple[Kill, ...]
    kind, asynchronous = KINDS[number % len(KINDS)], draw.random() < 0.75
    if kind in ("start", "resume"):
        first = a_kill(draw, reference, lambda point: point.startswith(("step", "save")))
        points = [point for point in RESUMING if point.startswith(kind)]
        kills = (first, Kill(draw.randrange(key[1]), draw.choice(points)))
    else:
        kills = (a_kill(draw, reference, lambda point: point.startswith(kind)),)
        if draw.random() < 0.25:
            early = [point for point in RESUMING if point.startswith("start")]
            kills = (Kill(draw.randrange(key[1]), draw.choice(early)), *kills)
    return Scenario(CASES[key[0]], key[1], kills, asynchronous)


def restarts(draw: random.Random, key: Key, reference: Reference, number: int) -> Scenario:
    """One run that is killed `number` times in a row, anywhere, before it may end."""
    kills = [a_kill(draw, reference, lambda point: point.startswith(("step", "save")))]
    for _ in range(number - 1):
        if draw.random() < 0.5:
            kills.append(Kill(draw.randrange(key[1]), draw.choice(RESUMING)))
        else:
            point = draw.choice(["step data", "step forward: half", "step backward: half", "step end"])
            kills.append(Kill(draw.randrange(key[1]), point))
    return Scenario(CASES[key[0]], key[1], tuple(kills))


def _line(label: str, scenario: Scenario, outcome: Outcome) -> str:
    kills = "; again ".join(map(str, scenario.kills))
    seconds = ", ".join(f"{seconds:.1f} s" for seconds in outcome.seconds)
    how = "" if scenario.asynchronous else ", synchronous saves"
    missed = len(scenario.kills) - outcome.reached
    rest = f" ({missed} not reached: the run ended first)" if missed else ""
    found = "; ".join(outcome.problems) or "same bits, samples exact, nothing lost"
    back = f"; training resumed after {seconds}" if seconds else ""
    return f"{label} {scenario.case.name} x {scenario.ranks}{how}: {kills}{rest}: {found}{back}"


def table(results: Sequence[tuple[Scenario, Outcome]]) -> str:
    """Markdown: a row for each kind of point, backend and number of ranks."""
    rows: dict[tuple[str, int, str], list[Outcome]] = {}
    for scenario, outcome in results:
        rows.setdefault((scenario.case.name, scenario.ranks, scenario.kind), []).append(outcome)
    head = "| backend | ranks | killed in | runs | kills | same bits | samples exact | checkpoints lost |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for (name, ranks, kind), found in sorted(rows.items()):
        lines.append(f"| `{name}` | {ranks} | {kind} | {_cells(found)} |")
    lines.append(f"| all | | | {_cells([outcome for _, outcome in results])} |")
    return "\n".join(lines)


def _cells(found: Sequence[Outcome]) -> str:
    counts = [
        len(found),
        sum(outcome.reached for outcome in found),
        sum(not outcome.bits for outcome in found),
        sum(not outcome.samples for outcome in found),
        sum(bool(outcome.lost) for outcome in found),
    ]
    return " | ".join(map(str, counts))


def _summary(results: Sequence[tuple[Scenario, Outcome]]) -> str:
    seconds = [value for _, outcome in results for value in outcome.seconds]
    left = sum(bool(outcome.left) for _, outcome in results)
    misreported = sum(bool(outcome.misreported) for _, outcome in results)
    unstarted = sum(outcome.unstarted for _, outcome in results)
    took = f"median {median(seconds):.1f} s, longest {max(seconds):.1f} s" if seconds else "not measured"
    counted = f"{len(seconds)} restart{'' if len(seconds) == 1 else 's'}"
    return (
        f"Time from a kill to the next trained step, including the restart: {took}."
        f" This counts the {counted} that trained at least one step."
        f"\nRuns that left files or processes behind: {left}. Exits that did not name the failure:"
        f" {misreported}."
        f"\nStarts that failed before any rank was running, and were repeated: {unstarted}."
    )


if __name__ == "__main__":
    sys.exit(main())
