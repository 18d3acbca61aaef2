"""Watches the ranks of one host: says which one holds the others up, and ends a run that hangs.

The launcher's process looks at its ranks' journals about once a second. Where somebody else started
the ranks, a process of its own beside local rank 0 does (`watcher`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import WorkerError
from distributed.resilience import failure_messages, stack_dumps
from distributed.resilience.failure_reports import report_of, say
from distributed.resilience.hang_diagnosis import Seen, Verdict, Worker, judge
from distributed.resilience.phase_journal import RUNNING, Entry, Journal
from distributed.system import processes
from distributed.system.private_files import write_private

if TYPE_CHECKING:
    from distributed.interfaces.plan import RunPlan
    from distributed.resilience.host_heartbeat import HostWatch, LostHost

__all__ = ["WATCHED", "Limits", "Watch", "write_report"]

WATCHED = "DISTRIBUTED_WATCHED"
"""Set to 1 in a rank whose launcher watches it."""
_BUSY = 0.02
"""Share of a core above which a rank computes: on a crowded host it may get no more than that, and one
that waits uses next to nothing."""
_WORKERS = 8
_HEARSAY = 1.5
"""Seconds to wait for the name of a lost host when a rank only knows that it lost another."""


@dataclass(frozen=True)
class Limits:
    """When to speak up, and when to end it.

    Attributes:
        stall_report: seconds without a move after which a rank is reported; None never.
        hang_timeout: seconds after which a run that hangs is ended; None never.
        folder: where ``failure_report_<n>.txt`` is written; None writes none.
        num_nodes: hosts of the run. On one of several, ranks that all wait may wait for another host.
        blocking_modules: modules in which a rank waits for others, as the backend's spec names them.
    """

    stall_report: float | None = 30.0
    hang_timeout: float | None = 600.0
    folder: str | None = None
    num_nodes: int = 1
    blocking_modules: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: RunPlan) -> Limits:
        """What the plan's configuration says."""
        config, modules = plan.config, plan.spec.blocking_modules
        return cls(config.stall_report, config.hang_timeout, config.checkpoint_dir, plan.num_nodes, modules)


@dataclass
class _Track:
    """What is remembered of one rank between looks."""

    marks: int = -1
    since: float = 0.0
    phase: str = ""
    seconds: float = 0.0
    looked: float = 0.0
    share: float = 0.0


class Watch:
    """The ranks of one host.

    Args:
        folder: private; holds the ranks' journals and stacks.
        limits: when to speak up.
        hosts: tells of the other hosts; None on one host.
    """

    def __init__(self, folder: Path, limits: Limits, hosts: HostWatch | None = None) -> None:
        self.folder, self.limits, self.hosts = folder, limits, hosts
        self.host = socket.gethostname()
        shortest = min(limits.stall_report or 4.0, limits.hang_timeout or 4.0)
        self.period = min(1.0, max(0.05, shortest / 4))
        """Seconds between looks."""
        self._tracks: dict[int, _Track] = {}
        self._usual: dict[str, float] = {}
        self._told: tuple[int, float] | None = None
        self._judged = False
        self._kills = processes.oom_kills()

    # -- looking ---------------------------------------------------------------------

    def look(self, pids: Mapping[int, int]) -> None:
        """Look at the ranks once: call it every `period` seconds.

        Args:
            pids: rank -> process id of those that still run.

        Raises:
            WorkerError: the run hangs, or another host is lost; names the rank or host to blame. A report
                was written.
        """
        if self.hosts is not None and (lost := self.hosts.lost) is not None:
            raise self._lost(lost, pids)
        entries = {rank: Entry.read(Journal.path(self.folder, rank)) for rank in pids}
        ages = {rank: self._age(rank, pids[rank], entry) for rank, entry in entries.items()}
        still = {rank: age for rank, age in ages.items() if _counts(entries[rank])}
        if not still:
            return
        age = max(still.values())
        slowest = entries[max(still, key=still.__getitem__)]
        limit = self._limit(slowest.phase if slowest else "")
        if limit is None or age < limit:
            self._say_that_it_moves(ages)
            return
        hangs = self.limits.hang_timeout is not None and age >= self.limits.hang_timeout
        ranks = self.see(pids, ask=True)
        # One that moved while the ranks were asked for their stacks holds nobody up.
        if max((seen.age for seen in ranks if _counts(seen.entry)), default=0.0) >= limit:
            self._report(ranks, hangs)

    def see(self, pids: Mapping[int, int], ask: bool = False) -> list[Seen]:
        """Every rank of `pids` as it is now; with `ask`, with the stacks of those that run."""
        return [self._see(rank, pid, ask) for rank, pid in sorted(pids.items())]

    def _age(self, rank: int, pid: int, entry: Entry | None) -> float:
        """Seconds since the rank moved; keeps account of its usual pauses and its CPU time."""
        now, track = time.perf_counter(), self._tracks.setdefault(rank, _Track())
        if entry is not None and track.marks != entry.marks:
            if track.phase:
                took = entry.since - track.since
                self._usual[track.phase] = max(self._usual.get(track.phase, 0.0), took)
            # What a first step or a compilation takes is no measure for the rest.
            track.phase = entry.phase if entry.step > 1 else ""
            track.marks, track.since = entry.marks, entry.since
        process = processes.look_at(pid)
        if track.looked:
            track.share = (process.seconds - track.seconds) / max(now - track.looked, 1e-3)
        track.seconds, track.looked = process.seconds, now
        return now - entry.since if entry else process.age

    def _limit(self, phase: str) -> float | None:
        """Seconds without a move that are worth a report: more than what this run has shown to be
        usual, and after a report twice as long as then."""
        told = self._told[1] if self._told else 0.0
        judged = self._told is not None and self._judged
        report, end = self.limits.stall_report, self.limits.hang_timeout
        limits = [] if report is None else [2.0 * told or max(report, 2.0 * self._usual.get(phase, 0.0))]
        if end is not None:
            limits.append(2.0 * told if judged else end)
        return min(limits, default=None)

    def _see(self, rank: int, pid: int, ask: bool) -> Seen:
        entry, process = Entry.read(Journal.path(self.folder, rank)), processes.look_at(pid)
        stack: Sequence[stack_dumps.Frame] = ()
        workers: Sequence[Worker] = ()
        path = stack_dumps.stack_path(self.folder, rank)
        if ask and entry is not None and process.alive and process.state != "T" and path.exists():
            stack = stack_dumps.parse(stack_dumps.ask(pid, path), entry.thread)
            if any("/torch/utils/data/" in frame.file for frame in stack):
                workers = [_worker(child, path) for child in list(processes.children(pid))[:_WORKERS]]
        age = time.perf_counter() - entry.since if entry else process.age
        track = self._tracks.get(rank, _Track())
        loads = any(frame.file.startswith("<frozen importlib") for frame in stack)
        busy = track.share > _BUSY or loads or process.state == "R"
        blocking = self.limits.blocking_modules
        return Seen(
            rank, self.host, pid, entry, age, process.state, busy, stack, workers, blocking_modules=blocking
        )

    def close(self) -> None:
        """The ranks have ended."""
        if self.hosts is not None:
            self.hosts.close()

    # -- telling ---------------------------------------------------------------------

    def _report(self, ranks: list[Seen], hangs: bool) -> None:
        verdict, self._judged = judge(ranks), hangs
        seen = _named(ranks, verdict)
        self._told = (seen.rank, max(seen.age, self.limits.stall_report or 0.0))
        if hangs and _is_stuck(ranks, verdict, self.limits.num_nodes):
            text = failure_messages.stalled(ranks, verdict, ended=True)
            where = write_report(self.limits.folder, text)
            stack = "\n".join(stack_dumps.innermost(list(seen.stack)))
            raise WorkerError(
                text.partition("\n")[0] + (f" This report is in {where}." if where else ""),
                rank=seen.rank,
                host=seen.host,
                exc_type="Hang",
                worker_traceback=text.partition("\n")[2] or stack,
                phase=seen.entry.phase if seen.entry else None,
                step=seen.entry.step if seen.entry else None,
            )
        text = failure_messages.stalled(ranks, verdict, ended=False)
        write_report(self.limits.folder, text)
        say(text)

    def _lost(self, lost: LostHost, pids: Mapping[int, int]) -> WorkerError:
        error = lost.error()
        entries = [entry for rank in pids if (entry := Entry.read(Journal.path(self.folder, rank)))]
        place = max(entries, key=lambda entry: entry.step, default=None)
        text = error.summary + (f". The ranks here were in {place.place()}" if place else "") + "."
        where = write_report(self.limits.folder, text)
        return WorkerError(
            text + (f" This report is in {where}." if where else ""),
            rank=error.rank,
            host=error.host,
            exc_type=error.exc_type,
            step=place.step if place else None,
        )

    def _say_that_it_moves(self, ages: Mapping[int, float]) -> None:
        if self._told is None or ages.get(self._told[0], 0.0) >= self._told[1]:
            return
        rank, before = self._told
        self._told = None
        say(f"rank {rank} ({self.host}) moves again, after more than {before:.0f} s")

    def explain(
        self, report: Mapping[str, Any], failed: Iterable[int], pids: Mapping[int, int]
    ) -> dict[str, Any]:
        """`report` of a rank that failed, with where it was, what the others did, and what to try.

        Args:
            report: as `failures.report_of` makes it.
            failed: all ranks that failed.
            pids: rank -> process id of all ranks of this host.
        """
        if report.get("user_error") is not None:
            return dict(report)
        if report["second_hand"] and self.hosts is not None and (lost := self.hosts.lost_within(_HEARSAY)):
            error = self._lost(lost, pids)
            return {**report, **report_of(error, error.rank), "blamed": True, "account": ""}
        gone = set(failed)
        # One that waited in vain does not know for whom; their stacks tell.
        unsure = bool(report["second_hand"]) or report["exc_type"] == "SIGABRT"
        ranks = self.see(pids, ask=unsure)
        told = failure_messages.crashed(
            dict(report), ranks, gone, self.folder, processes.oom_kills() - self._kills
        )
        written = write_report(self.limits.folder, failure_messages.as_text(told))
        if written:
            told["account"] = f"{told['account']} This report is in {written}.".lstrip()
        return told


def _counts(entry: Entry | None) -> bool:
    return entry is not None and entry.status == RUNNING and entry.phase != "idle"


def _named(ranks: Sequence[Seen], verdict: Verdict) -> Seen:
    """Whom a report speaks of: the culprit, or without one the rank that has waited longest."""
    if verdict.culprits:
        return next(seen for seen in ranks if seen.rank == verdict.culprits[0])
    return max(ranks, key=lambda seen: seen.age)


def _is_stuck(ranks: Sequence[Seen], verdict: Verdict, num_nodes: int) -> bool:
    """Whether waiting on is in vain. A rank that computes while nobody waits for it is at work; ranks
    that all wait in one place may wait for another host, which names its own; and loading and
    compiling take as long as they take."""
    culprit = _named(ranks, verdict)
    if verdict.kind == "alone" or culprit.entry is None or culprit.entry.step <= 1:
        return not culprit.busy
    return verdict.kind != "together" or num_nodes == 1


def _worker(pid: int, path: Path) -> Worker:
    state = processes.look_at(pid).state
    return Worker(
        pid, state, stack_dumps.parse(stack_dumps.ask(pid, path)) if state not in ("T", "Z", "") else ()
    )


def write_report(folder: str | None, text: str) -> str | None:
    """Write ``failure_report_<n>.txt`` with the next free number; its path, or None without a folder
    and where it cannot be written: the report must not hide behind that."""
    if folder is None:
        return None
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        target = _next_free(place)
        try:
            write_private(target, f"{text.rstrip()}\n".encode())
        except OSError:
            target.unlink(missing_ok=True)
            raise
    except OSError as error:
        say(f"the failure report cannot be written to {place}: {error}")
        return None
    return str(target)


def _next_free(place: Path) -> Path:
    """A name that is now taken, by an empty file, and was not before."""
    number = 1
    while True:
        target = place / f"failure_report_{number}.txt"
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return target
        except FileExistsError:
            number += 1
