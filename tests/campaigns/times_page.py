"""Tables of docs/test-times.md, and the seconds by which tests are ordered and chosen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.campaigns.last_green import PAGE
from tests.support.recorded_times import RECORDED, RunTimes
from tests.support.tiers import Group, folding_group, scope_of

__all__ = ["folded_seconds", "read_record", "render", "update", "write_page"]

_RUNS = ("before", "push", "campaigns")
_BEGIN, _END = "<!-- made by python -m tests.campaigns times -->", "<!-- end -->"


def read_record(path: Path = RECORDED) -> dict[str, Any]:
    """Sums of the recorded runs by name (before, push, campaigns); empty before the first one."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def folded_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Group -> seconds in one process of the tests that a push leaves out, by the newest run."""
    found: dict[str, float] = {}
    for run in ("before", "campaigns"):
        found |= record.get(run, {}).get("folded", {})
    return found


def update(
    record: dict[str, Any],
    run: str,
    times: RunTimes,
    groups: Iterable[Group],
    commit: str,
    steps: Mapping[str, float],
) -> None:
    """Put the sums of a recorded run into `record`."""
    groups = list(groups)
    rows: dict[str, list[float]] = {}
    folded: Counter[str] = Counter()
    scopes: Counter[str] = Counter()
    for test, seconds in times.tests.items():
        row = rows.setdefault(_row(test, groups), [0, 0.0])
        row[0] += 1
        row[1] += seconds
        scopes[scope_of(test)] += seconds
        if group := folding_group(test, groups):
            folded[group.name] += seconds
    record[run] = {
        "commit": commit,
        "wall": round(times.wall),
        "steps": dict(steps),
        "rows": {name: [count, round(seconds, 1)] for name, (count, seconds) in sorted(rows.items())},
        "folded": {name: round(seconds, 1) for name, seconds in sorted(folded.items())},
        "scopes": {name: round(seconds, 1) for name, seconds in sorted(scopes.items()) if seconds >= 1.0},
    }


def _row(test: str, groups: Iterable[Group]) -> str:
    """Name of the test's group, or its folder."""
    for group in groups:
        if group.contains(test):
            return group.name
    folder = Path(test.partition("::")[0]).parent.parts[:2]
    return "/".join(folder) + "/"


def render(record: Mapping[str, Any], groups: Mapping[str, Group]) -> str:
    """Both tables, in Markdown."""
    runs = [record.get(run, {"rows": {}, "steps": {}}) for run in _RUNS]
    names = sorted(
        {name for run in runs for name in run["rows"]}, key=lambda name: (name not in groups, name)
    )
    lines = [
        "| tests | before | s | at a push | s | in campaigns | s |",
        "|---|---|---|---|---|---|---|",
    ]
    total = [[0, 0.0] for _ in runs]
    for name in names:
        cells = [run["rows"].get(name, [0, 0.0]) for run in runs]
        total = [[a[0] + b[0], a[1] + b[1]] for a, b in zip(total, cells, strict=True)]
        subject = f"**{name}**: {groups[name].subject}" if name in groups else f"`{name}`"
        lines.append(_line(subject, cells))
    lines.append(_line("all", total))
    steps = list(dict.fromkeys(step for run in runs for step in run["steps"]))
    if steps:
        lines += ["", "| step of `.ci/run` | before, s | at a push, s |", "|---|---|---|"]
        lines += [_steps_line(step, runs[0]["steps"], runs[1]["steps"]) for step in steps]
    return "\n".join(lines)


def _line(subject: str, cells: Iterable[Iterable[float]]) -> str:
    texts = [f"{value:.0f}" if count else "" for count, seconds in cells for value in (count, seconds)]
    return f"| {subject} | {' | '.join(texts)} |"


def _steps_line(step: str, *runs: Mapping[str, float]) -> str:
    return f"| {step} | {' | '.join(f'{run[step]:.0f}' if step in run else '' for run in runs)} |"


def write_page(record: Mapping[str, Any], groups: Mapping[str, Group], path: Path = PAGE) -> None:
    """Replace the tables of the page."""
    head, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    tail = rest.partition(_END)[2]
    path.write_text(f"{head}{_BEGIN}\n\n{render(record, groups)}\n\n{_END}{tail}", encoding="utf-8")
