"""Seconds of tests: recorded during a run, kept for the next one, which starts the longest files first.

``pytest --record-times FILE`` appends a line of JSON for every phase of every test. ``python -m
tests.campaigns times`` makes the sums of them that are committed, in ``tests/campaigns/recorded.json``.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["RECORDED", "LongestFirst", "Recorder", "RunTimes", "read_seconds", "read_times"]

RECORDED = Path(__file__).parents[1] / "campaigns" / "recorded.json"


class Recorder:
    """Append the seconds of every phase to a file, in the process that starts the workers.

    Args:
        path: JSON lines; the folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._write(begin=time.time())

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write one phase."""
        self._write(id=report.nodeid, when=report.when, seconds=report.duration, outcome=report.outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the end of the run."""
        self._write(end=time.time(), exit=int(exitstatus))


@dataclass
class RunTimes:
    """Times of one run of the tests.

    Attributes:
        tests: test id -> seconds of its three phases.
        passed: ids of tests that passed or were skipped.
        wall: seconds from the start of pytest to its end, over all runs in the file.
    """

    tests: Counter[str] = field(default_factory=Counter)
    passed: set[str] = field(default_factory=set)
    wall: float = 0.0


def read_times(lines: Iterable[str]) -> RunTimes:
    """Times of a recorded file. A test that was run again counts by its newest run."""
    found, failed, begin = RunTimes(), set(), 0.0
    for row in _rows(lines):
        if "begin" in row:
            begin = row["begin"]
        elif "end" in row:
            found.wall += row["end"] - begin
        else:
            if row["when"] == "setup":  # run again by hand, as where the machine lacked memory
                failed.discard(row["id"])
                found.tests[row["id"]] = 0.0  # type: ignore[assignment]  # of a Counter
            found.tests[row["id"]] += row["seconds"]
            if row["outcome"] == "failed":
                failed.add(row["id"])
            elif row["when"] == "teardown":
                found.passed.add(row["id"])
    found.passed -= failed
    return found


def _rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.endswith("}\n"):  # the last one may be cut off
            yield json.loads(line)


def read_seconds(path: Path = RECORDED) -> dict[str, float]:
    """Scope (file or class) -> its seconds in the newest recorded run; empty before the first one."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found: dict[str, float] = {}
    for run in ("before", "campaigns", "push"):
        found |= record.get(run, {}).get("scopes", {})
    return found


class LongestFirst:
    """Let pytest-xdist start the scopes that took longest first, so that all workers end together.

    A scope without recorded seconds counts a second for each of its tests.
    """

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Return the scheduler of ``--dist loadscope`` with another order."""
        if config.getoption("dist") != "loadscope":
            return None
        from xdist.scheduler import LoadScopeScheduling

        seconds = read_seconds()

        class Scheduling(LoadScopeScheduling):
            def _assign_work_unit(self, node: Any) -> None:
                longest = max(self.workqueue, key=lambda unit: seconds.get(unit, len(self.workqueue[unit])))
                self.workqueue.move_to_end(longest, last=False)
                super()._assign_work_unit(node)

        return Scheduling(config, log)
