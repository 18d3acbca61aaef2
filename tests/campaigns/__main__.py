"""Groups of tests that a push folds: choose those of a push, run them all, record their seconds.

::

    make campaigns                          # every group; what has passed on this commit is not run again
    make campaigns CAMPAIGN="kit-ray tuner"
    python -m tests.campaigns choose        # names of the groups that .ci/run adds to a push
    python -m tests.campaigns times push build/test-times/push.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.campaigns.choose import LIMIT, changed_files, check_counts, choose, reasons
from tests.campaigns.last_green import PAGE, GroupResult, LastGreen, read_last_green, write_last_green
from tests.campaigns.times_page import folded_seconds, read_record, update, write_page
from tests.support.collected_ids import collect
from tests.support.num_processes import num_processes
from tests.support.recorded_times import RECORDED, RunTimes, read_times
from tests.support.tiers import Group, folding_group, read_groups

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 2 for a line of the page that cannot be true."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    pick = verbs.add_parser("choose", help="print the groups that a push runs; reasons on stderr")
    pick.add_argument("--elapsed", type=float, default=0.0, help="seconds that the push has taken so far")
    go = verbs.add_parser("run", help="run groups that have not passed on this commit")
    go.add_argument("groups", nargs="*", help="default: all")
    note = verbs.add_parser("times", help="put a recorded run into docs/test-times.md")
    note.add_argument("run", choices=("before", "push", "campaigns"))
    note.add_argument("file", type=Path, help="written by pytest --record-times")
    note.add_argument("--commit", default="", help="default: HEAD")
    note.add_argument("--steps", type=Path, help="written by .ci/run: a step and its seconds a line")
    args = parser.parse_args(argv)
    try:
        if args.verb == "choose":
            return _choose(args.elapsed)
        if args.verb == "run":
            return _run(args.groups)
        return _times(args.run, args.file, args.commit or head(), args.steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def head() -> str:
    """Full hash of HEAD."""
    return _output("git", "rev-parse", "HEAD").strip()


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def folded_tests(groups: Mapping[str, Group]) -> dict[str, list[str]]:
    """Group -> ids of the tests that a push leaves out."""
    found: dict[str, list[str]] = {name: [] for name in groups}
    outside = sorted({path for group in groups.values() if group.target for path in group.tests})
    for test in [*collect(["--tier=campaigns"]), *(collect(outside) if outside else [])]:
        if group := folding_group(test, groups.values()):
            found[group.name].append(test)
    return found


def _choose(elapsed: float) -> int:
    groups = read_groups()
    last = read_last_green(PAGE.read_text(encoding="utf-8"))
    due = reasons(groups.values(), last, changed_files)
    check_counts(last, {name: len(tests) for name, tests in folded_tests(groups).items()}, due)
    record = read_record()
    left = LIMIT - elapsed - record.get("push", {}).get("wall", 0)
    choice = choose(due, folded_seconds(record), left, num_processes())
    for name in choice.chosen:
        print(f"campaign group {name}: {due[name]}", file=sys.stderr)
    for name in choice.put_off:
        print(f"campaign group {name} is PUT OFF, {due[name]}: run make campaigns", file=sys.stderr)
    if not due:
        print("no campaign group is due", file=sys.stderr)
    print(" ".join(choice.chosen))
    return 0


def _run(names: Sequence[str]) -> int:
    groups, commit = read_groups(), head()
    if unknown := [name for name in names if name not in groups]:
        raise ValueError(
            f"no group {unknown[0]!r} in tests/campaigns/guards.toml. Groups: {', '.join(groups)}"
        )
    file = ROOT / "build" / "campaigns" / f"{commit}.jsonl"
    tests = folded_tests(groups)
    passed = _read(file).passed
    due = [name for name in names or groups if set(tests[name]) - passed]
    print(f"campaigns at {commit[:12]}: {', '.join(due) or 'nothing left to run'}", flush=True)
    ours = [name for name in due if groups[name].target is None]
    if ours:
        chosen = [f"--campaign={name}" for name in ours]
        command = [sys.executable, "-m", "pytest", "-n", str(num_processes()), "--dist", "loadscope", "-q"]
        _call([*command, "--tier=campaigns", *chosen, f"--record-times={file}"])
    for name in due:
        if target := groups[name].target:
            _call(["make", target, f"PYTEST_FLAGS=-q --record-times={file}"])
    times = _read(file)
    missing = [name for name in groups if set(tests[name]) - times.passed]
    for name in missing:
        print(
            f"not green: {name}, {len(set(tests[name]) - times.passed)} of {len(tests[name])} tests",
            flush=True,
        )
    if not missing:
        _record_green(commit, tests, times)
    return 1 if set(missing) & set(due) else 0


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=False)


def _read(file: Path) -> RunTimes:
    return (
        read_times(file.read_text(encoding="utf-8").splitlines(keepends=True))
        if file.exists()
        else RunTimes()
    )


def _record_green(commit: str, tests: Mapping[str, Iterable[str]], times: RunTimes) -> None:
    if _output("git", "status", "--porcelain", "--untracked-files=no"):
        print("all groups passed; files differ from the commit, so that no line is written", flush=True)
        return
    results = {
        name: GroupResult(len(set(ids)), round(sum(times.tests[test] for test in ids)))
        for name, ids in tests.items()
    }
    last = LastGreen(commit, datetime.date.today().isoformat(), results)
    write_last_green(last)
    print(f"wrote to docs/test-times.md: {last}", flush=True)


def _times(run: str, file: Path, commit: str, steps: Path | None) -> int:
    groups, record, times = read_groups(), read_record(), _read(file)
    rows = [line.split("\t") for line in steps.read_text(encoding="utf-8").splitlines()] if steps else []
    update(record, run, times, groups.values(), commit, {name: float(seconds) for name, seconds in rows})
    RECORDED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_page(record, groups)
    print(f"{run}: {len(times.tests)} tests, {sum(times.tests.values()):.0f} s in {times.wall:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
