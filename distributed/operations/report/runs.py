"""A run from its record: attempts, failures, end."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from distributed.interfaces.metric import larger_is_better, metric_name

__all__ = ["Attempt", "Failure", "Run", "Series"]

STALE = 600.0
"""Seconds without a line after which a run on another host counts as interrupted, if it wrote often."""
_PAUSES = 3.0
"""Multiple of its longest pause after which a run that writes seldom counts as interrupted."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """Values of a metric over optimizer steps."""

    steps: list[int]
    values: list[float]


@dataclass
class Attempt:
    """One start of the ranks, and what they wrote.

    Attributes:
        start: first line; empty when that is damaged.
        lines: other lines, in order.
    """

    start: Line
    lines: list[Line] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The optimizer step from which it resumes."""
        place = self.start.get("place", {})
        return int(place.get("step") or 0)

    def of(self, kind: str) -> list[Line]:
        """Its lines of that kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def last_step(self) -> int:
        """The last step in its lines."""
        return max((line["step"] for line in self.lines if "step" in line), default=self.step)


@dataclass(frozen=True)
class Failure:
    """A failure that ended the run, or after which its ranks were restarted.

    Attributes:
        time: seconds since the epoch.
        summary: one paragraph.
        rank: failed rank, None when unknown.
        host: host of `rank`, empty when unknown.
        details: traceback, stacks, or the report's text; may be empty.
        step: step of the failure, None when unknown.
        fatal: whether it ended the run.
        reported_by: calls of `fit` that reported it: one per host.
    """

    time: float
    summary: str
    rank: int | None = None
    host: str = ""
    details: str = ""
    step: int | None = None
    fatal: bool = False
    reported_by: tuple[str, ...] = ()


@dataclass
class Run:
    """One training, from its first attempt to its last.

    Attributes:
        end: the last ``end`` line, None while there is none.
        end_elsewhere: the last ``end`` line of a host that rank 0 was not on, None once rank 0 has written
            again: the run continued without that host.
        notes: notes for the reader, one sentence each.
    """

    folder: Path
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    end: Line | None = None
    end_elsewhere: Line | None = None
    notes: list[str] = field(default_factory=list)

    # -- settings ----------------------------------------------------------------------

    @property
    def head(self) -> Line:
        """The line that describes the run: the last attempt's first, or that of a failure before any."""
        known = [attempt.start for attempt in self.attempts if attempt.start]
        return known[-1] if known else self.end or {}

    @property
    def place(self) -> dict[str, Any]:
        """Backend, ranks, nodes, hosts, device, precision, batch."""
        place = self.head.get("place")
        return place if isinstance(place, dict) else {}

    @property
    def config(self) -> list[tuple[str, Any, str]]:
        """(name, value, origin) of every field."""
        return self.head.get("config") or []

    def setting(self, name: str) -> Any:
        """The value of the configuration field `name`, None when unknown."""
        return next((value for known, value, _ in self.config if known == name), None)

    @property
    def name(self) -> str:
        """The run's own name, or its folder's."""
        return str(self.head.get("name") or self.folder.resolve().name or self.folder)

    @property
    def started(self) -> float:
        """When its first attempt began, in seconds since the epoch."""
        return min((line["time"] for line in self._all()), default=0.0)

    @property
    def last_seen(self) -> float:
        """When its last line was written."""
        return max((line["time"] for line in self._all()), default=0.0)

    # -- results ------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped``, ``failed``, or ``interrupted``: no end was written, and
        no process is left to write it."""
        if self.end is not None:
            return str(self.end["status"])
        done = self.attempts[-1].of("finish") if self.attempts else []
        if done and done[-1]["status"] != "failed":
            return str(done[-1]["status"])
        if self._lives():
            return "running"
        return str(self.end_elsewhere["status"]) if self.end_elsewhere else "interrupted"

    @property
    def unseen_host(self) -> str:
        """The host of rank 0 when none of the run's processes can be looked up on this one, else empty."""
        hosts = [str(process.get("host") or "") for process in self._processes()]
        return hosts[0] if hosts and socket.gethostname() not in hosts else ""

    @property
    def several_nodes(self) -> bool:
        """Whether any attempt was on more than one, so that several callers of `fit` write the record."""
        places = [self.place, *(attempt.start.get("place") or {} for attempt in self.attempts)]
        return any((place.get("num_nodes") or 1) > 1 for place in places)

    @property
    def reason(self) -> str:
        """Why it was stopped, empty when it was not."""
        return str((self.end or {}).get("reason") or "")

    @property
    def totals(self) -> dict[str, Any]:
        """Totals of the last `fit`; empty when it did not return."""
        return (self.end or {}).get("totals") or {}

    @property
    def steps(self) -> int:
        """The last optimizer step that counts."""
        return max((attempt.last_step for attempt in self.attempts[-1:]), default=0)

    @property
    def epochs(self) -> list[Line]:
        """The epochs' metrics that count, in order."""
        return list(self.kept("epoch"))

    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best epoch by the metric that decides; None without validation."""
        asked, mode = self.setting("checkpoint.metric"), str(self.setting("checkpoint.mode") or "auto")
        have = self.figures("epoch")
        name = next((name for name in (asked, f"val_{asked}") if name in have), None)
        name = name or metric_name(None, dict.fromkeys(have, 0.0))
        series = self.series(name or "", "epoch")
        found = [pair for pair in zip(series.values, series.steps, strict=True) if pair[0] == pair[0]]
        if name is None or not found:
            return None
        choose = max if larger_is_better(mode, name) else min
        value, step = choose(found, key=lambda pair: pair[0])
        return name, value, step

    # -- curves --------------------------------------------------------------------------

    def figures(self, kind: str = "log") -> list[str]:
        """Names of the logged metrics, in order of first use."""
        return list(dict.fromkeys(name for line in self.kept(kind) for name in line["figures"]))

    def series(self, name: str, kind: str = "log") -> Series:
        """The metric `name` of log steps (or epochs); for each step, the last attempt's value."""
        pairs = [(line["step"], line["figures"][name]) for line in self.kept(kind) if name in line["figures"]]
        return Series([step for step, _ in pairs], [value for _, value in pairs])

    def repeated(self, name: str) -> list[Series]:
        """Values that attempts logged beyond the step from which a later one resumed, one series each."""
        found = []
        for attempt, end in zip(self.attempts, self._ends(), strict=True):
            lines = [line for line in attempt.of("log") if line["step"] > end and name in line["figures"]]
            if lines:
                found.append(
                    Series([line["step"] for line in lines], [line["figures"][name] for line in lines])
                )
        return found

    def resumes(self) -> list[int]:
        """Steps from which later attempts resumed."""
        return [attempt.step for attempt in self.attempts[1:]]

    def checkpoints(self) -> list[int]:
        """Steps that were saved and count."""
        return [line["step"] for line in self.kept("checkpoint")]

    def throughput(self) -> float | None:
        """Median samples per second of the log steps, None without any."""
        values = [value for value in self.series("samples_per_second").values if math.isfinite(value)]
        return median(values) if values else None

    def seconds(self) -> float:
        """From the first line of its attempts to the last, pauses between them left out."""
        total = 0.0
        for attempt in self.attempts:
            times = [line["time"] for line in (attempt.start, *attempt.lines) if line]
            total += max(times) - min(times)
        return total

    # -- inside --------------------------------------------------------------------------

    def _all(self) -> Iterator[Line]:
        for attempt in self.attempts:
            yield from filter(None, (attempt.start, *attempt.lines))
        if self.end:
            yield self.end

    def _ends(self) -> list[float]:
        """The last step that counts of each attempt: a later one resumed from there."""
        starts = [attempt.step for attempt in self.attempts]
        return [min(starts[index + 1 :], default=float("inf")) for index in range(len(starts))]

    def kept(self, kind: str) -> Iterator[Line]:
        for attempt, end in zip(self.attempts, self._ends(), strict=True):
            yield from (line for line in attempt.of(kind) if line["step"] <= end)

    def _lives(self) -> bool:
        here = [p for p in self._processes() if p.get("host") == socket.gethostname()]
        if here:
            return any(_is_alive(process) for process in here)
        return time.time() - self.last_seen < max(STALE, _PAUSES * self._longest_pause())

    def _processes(self) -> list[dict[str, Any]]:
        return [p for p in self.head.get("processes") or [] if isinstance(p, dict)]

    def _longest_pause(self) -> float:
        """Seconds between two lines of an attempt; pauses between attempts do not count."""
        longest = 0.0
        for attempt in self.attempts:
            times = [line["time"] for line in (attempt.start, *attempt.lines) if line]
            longest = max([longest, *(after - before for before, after in pairwise(times))])
        return longest


def _is_alive(process: Mapping[str, Any]) -> bool:
    import psutil

    try:
        own = psutil.Process(int(process["pid"]))
        return (
            abs(own.create_time() - float(process["created"])) < 1.0 and own.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
