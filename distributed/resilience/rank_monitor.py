"""Monitor the ranks of one host: report the one that blocks the others, and stop a run that hangs.

The launcher's process reads its ranks' journals about once a second. If another launcher started the
ranks, a separate process beside local rank 0 does (`monitor_process`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed.errors import WorkerError
from distributed.interfaces.plan import RunPlan
from distributed.redaction import redact_text
from distributed.resilience import failure_messages, flight_dumps, stack_dumps
from distributed.resilience.collective_mismatch import Comparison, compare
from distributed.resilience.failure_reports import FailureReport
from distributed.resilience.hang_diagnosis import Diagnosis, LoaderWorker, RankSnapshot, diagnose
from distributed.resilience.host_heartbeat import HostHeartbeat, LostHost
from distributed.resilience.phase_journal import RUNNING, Entry, Journal
from distributed.resilience.running_time import RunningTime
from distributed.system import processes
from distributed.system.output import print_line
from distributed.system.private_files import write_private

WATCHED = "DISTRIBUTED_WATCHED"
"""Environment variable: 1 in a rank that its launcher monitors."""
_BUSY = 0.02
"""Fraction of a core above which a rank counts as computing. It is low because a crowded host leaves a
rank little more, and a waiting rank uses almost nothing."""
_WORKERS = 8
_HEARSAY = 1.5
"""Seconds to wait for the name of a lost host after a rank has reported a broken connection."""


@dataclass(frozen=True)
class Limits:
    """When to report a rank, and when to stop the run.

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
        """The limits of the plan's configuration."""
        config, modules = plan.config, plan.spec.blocking_modules
        return cls(config.stall_report, config.hang_timeout, config.checkpoint_dir, plan.num_nodes, modules)


@dataclass
class _Track:
    """State of one rank between polls."""

    marks: int = -1
    since: float = 0.0
    phase: str = ""
    seconds: float = 0.0
    looked: float = 0.0
    share: float = 0.0
    queued: float = 0.0
    queued_share: float = 0.0


class RankMonitor:
    """Monitors the ranks of one host.

    Time in which the monitor itself was suspended does not count: the ranks were suspended with it.

    Args:
        folder: private folder of the ranks' journals and stacks.
        hosts: monitor of the other hosts; None on one host.
    """

    def __init__(self, folder: Path, limits: Limits, hosts: HostHeartbeat | None = None) -> None:
        self.folder, self.limits, self.hosts = folder, limits, hosts
        self.host = socket.gethostname()
        shortest = min(limits.stall_report or 4.0, limits.hang_timeout or 4.0)
        self.period = min(1.0, max(0.05, shortest / 4))
        """Seconds between polls."""
        self._time = RunningTime(self.period)
        self._tracks: dict[int, _Track] = {}
        self._usual: dict[str, float] = {}
        self._reported: tuple[int, float] | None = None
        self._judged = False
        self._kills = processes.oom_kills()

    # -- observing -------------------------------------------------------------------

    def look(self, pids: Mapping[int, int]) -> None:
        """Check the ranks once; call it every `period` seconds.

        Args:
            pids: rank -> process id of the running ranks.

        Raises:
            WorkerError: the run hangs, or another host is lost; names the rank or host to blame. A report
                was written.
        """
        self._time.tick()
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
            self._report_progress(ages)
            return
        hangs = self.limits.hang_timeout is not None and age >= self.limits.hang_timeout
        ranks = self.see(pids, ask=True)
        # A rank that made progress while the stacks were requested blocks no other.
        if max((snapshot.age for snapshot in ranks if _counts(snapshot.entry)), default=0.0) >= limit:
            self._report(ranks, hangs, self._compare(pids))

    def see(self, pids: Mapping[int, int], ask: bool = False) -> list[RankSnapshot]:
        """A snapshot of every rank of `pids`; with `ask`, including the stacks of running ranks."""
        return [self._see(rank, pid, ask) for rank, pid in sorted(pids.items())]

    def _age(self, rank: int, pid: int, entry: Entry | None) -> float:
        """Seconds without progress; updates the rank's usual phase durations and its CPU use."""
        now, track = self._time.tick(), self._tracks.setdefault(rank, _Track())
        if entry is not None and track.marks != entry.marks:
            if track.phase:
                took = self._time.between(track.since, entry.since)
                self._usual[track.phase] = max(self._usual.get(track.phase, 0.0), took)
            # A first step, or a compilation, takes longer than the later ones.
            track.phase = entry.phase if entry.step > 1 else ""
            track.marks, track.since = entry.marks, entry.since
        process, queued = processes.process_info(pid), processes.queued_seconds(pid)
        if track.looked:
            elapsed = max(self._time.between(track.looked, now), 1e-3)
            track.share = (process.seconds - track.seconds) / elapsed
            track.queued_share = (queued - track.queued) / elapsed
        track.seconds, track.queued, track.looked = process.seconds, queued, now
        return self._time.between(entry.since if entry else now - process.age, now)

    def _limit(self, phase: str) -> float | None:
        """Seconds without progress after which to report: more than is usual in this run, and twice the
        age of the last report."""
        reported = self._reported[1] if self._reported else 0.0
        judged = self._reported is not None and self._judged
        report, end = self.limits.stall_report, self.limits.hang_timeout
        limits = [] if report is None else [2.0 * reported or max(report, 2.0 * self._usual.get(phase, 0.0))]
        if end is not None:
            limits.append(2.0 * reported if judged else end)
        return min(limits, default=None)

    def _see(self, rank: int, pid: int, ask: bool) -> RankSnapshot:
        entry, process = Entry.read(Journal.path(self.folder, rank)), processes.process_info(pid)
        stack: Sequence[stack_dumps.Frame] = ()
        workers: Sequence[LoaderWorker] = ()
        path = stack_dumps.stack_path(self.folder, rank)
        if ask and entry is not None and process.alive and process.state != "T" and path.exists():
            stack = stack_dumps.parse(stack_dumps.request_dump(pid, path), entry.thread)
            if any("/torch/utils/data/" in frame.file for frame in stack):
                workers = [_worker(child, path) for child in list(processes.children(pid))[:_WORKERS]]
        now = self._time.tick()
        age = self._time.between(entry.since if entry else now - process.age, now)
        track = self._tracks.get(rank, _Track())
        loads = any(frame.file.startswith("<frozen importlib") for frame in stack)
        starves = _starts(entry) and (track.queued_share > _BUSY or processes.is_runnable(pid))
        busy = track.share > _BUSY or starves or loads or process.state == "R"
        blocking = self.limits.blocking_modules
        return RankSnapshot(
            rank, self.host, pid, entry, age, process.state, busy, stack, workers, blocking_modules=blocking
        )

    def close(self) -> None:
        """Stop monitoring other hosts, after the ranks have ended."""
        if self.hosts is not None:
            self.hosts.close()

    # -- reporting -------------------------------------------------------------------

    def _compare(self, pids: Mapping[int, int]) -> Comparison:
        """The ranks' collectives, by torch's Flight Recorder."""
        running = [
            rank for rank, pid in pids.items() if processes.process_info(pid).state not in ("", "T", "Z")
        ]
        try:
            return compare(flight_dumps.collect(self.folder, pids, running))
        except Exception as error:  # noqa: BLE001 - it must not hide the failure that is reported
            return Comparison(f"The ranks' Flight Recorder dumps could not be compared: {error!r}.")

    def _report(self, ranks: list[RankSnapshot], hangs: bool, collectives: Comparison) -> None:
        diagnosis, self._judged = diagnose(ranks), hangs
        snapshot = _named(ranks, diagnosis)
        self._reported = (snapshot.rank, max(snapshot.age, self.limits.stall_report or 0.0))
        if hangs and _is_stuck(ranks, diagnosis, self.limits.num_nodes):
            text = failure_messages.describe_stall(ranks, diagnosis, collectives, ended=True)
            raise self._error(
                text,
                rank=snapshot.rank,
                host=snapshot.host,
                exc_type="Hang",
                phase=snapshot.entry.phase if snapshot.entry else None,
                step=snapshot.entry.step if snapshot.entry else None,
            )
        text = failure_messages.describe_stall(ranks, diagnosis, collectives, ended=False)
        self._write(text)
        print_line(text)

    def _error(self, text: str, **about: Any) -> WorkerError:
        """The error with the message and the stacks of `text`, which is also written to a report file."""
        message, _, stacks = text.partition("\n")
        where, dumps = self._write(text)
        return WorkerError(
            message + (f" This report is in {where}." if where else "") + dumps,
            worker_traceback=stacks,
            **about,
        )

    def _write(self, text: str) -> tuple[str | None, str]:
        """Write a report and the Flight Recorder dumps beside it: its path, and a sentence on the dumps."""
        where = write_report(self.limits.folder, text)
        dumps = flight_dumps.keep_dumps(self.folder, where) if where else ""
        return where, f" The dumps are in {dumps}." if dumps else ""

    def _lost(self, lost: LostHost, pids: Mapping[int, int]) -> WorkerError:
        entries = [entry for rank in pids if (entry := Entry.read(Journal.path(self.folder, rank)))]
        place = max(entries, key=lambda entry: entry.step, default=None)
        error, step = lost.error(), place.step if place else None
        text = error.summary + (f". The ranks on this host were in {place.place()}" if place else "") + "."
        return self._error(text, rank=error.rank, host=error.host, exc_type=error.exc_type, step=step)

    def _report_progress(self, ages: Mapping[int, float]) -> None:
        if self._reported is None or ages.get(self._reported[0], 0.0) >= self._reported[1]:
            return
        rank, before = self._reported
        self._reported = None
        print_line(
            f"rank {rank} ({self.host}) is making progress again after a stall of more than {before:.0f} s"
        )

    def explain(self, report: FailureReport, failed: Iterable[int], pids: Mapping[int, int]) -> FailureReport:
        """Add to `report` where the failed rank was, what the others were doing, and what to try.

        Args:
            report: report of the rank that failed first.
            pids: rank -> process id of all ranks of this host.
        """
        if report.user_error is not None:
            return report
        if report.second_hand and self.hosts is not None and (lost := self.hosts.lost_within(_HEARSAY)):
            error = self._lost(lost, pids)
            return replace(FailureReport.from_error(error, error.rank), blamed=True)
        # A rank that lost its connection does not know the culprit; the ranks' stacks show it.
        ranks = self.see(pids, ask=report.second_hand or report.exc_type == "SIGABRT")
        kills = processes.oom_kills() - self._kills
        explained = failure_messages.describe_crash(report, ranks, failed, self.folder, kills)
        if not report.summary:
            account = f"{explained.account} {self._compare(pids).text}".strip()
            explained = replace(explained, account=account)
        where, dumps = self._write(explained.to_text())
        remark = f" This report is in {where}.{dumps}" if where else ""
        return replace(explained, account=f"{explained.account}{remark}".lstrip())


def _counts(entry: Entry | None) -> bool:
    return entry is not None and entry.status == RUNNING and entry.phase != "idle"


def _starts(entry: Entry | None) -> bool:
    """Return true until a rank has ended its first step. Before that, threads other than that of the loop do
    much of the work, and wait for a core on a crowded host."""
    return entry is None or entry.step <= 1


def _named(ranks: Sequence[RankSnapshot], diagnosis: Diagnosis) -> RankSnapshot:
    """The rank that a report names: the culprit, or without one the rank that has waited longest."""
    if diagnosis.culprits:
        return next(snapshot for snapshot in ranks if snapshot.rank == diagnosis.culprits[0])
    return max(ranks, key=lambda snapshot: snapshot.age)


def _is_stuck(ranks: Sequence[RankSnapshot], diagnosis: Diagnosis, num_nodes: int) -> bool:
    """Whether the run cannot continue by itself. Not so if a rank computes and no other waits for it, if
    all ranks wait in one place and may wait for another host, which reports its own, or while a rank
    loads or compiles. All ranks that start in one place wait for the slowest, whichever it is."""
    culprit = _named(ranks, diagnosis)
    if diagnosis.kind == "alone" or _starts(culprit.entry):
        return not any(snapshot.busy for snapshot in ([culprit] if diagnosis.culprits else ranks))
    return diagnosis.kind != "together" or num_nodes == 1


def _worker(pid: int, path: Path) -> LoaderWorker:
    state = processes.process_info(pid).state
    return LoaderWorker(
        pid,
        state,
        stack_dumps.parse(stack_dumps.request_dump(pid, path)) if state not in ("T", "Z", "") else (),
    )


def write_report(folder: str | None, text: str) -> str | None:
    """Write ``failure_report_<n>.txt`` with the next free number; returns its path, or None without a
    folder or if writing fails, so that an OSError never hides the report."""
    if folder is None:
        return None
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        target = _next_free(place)
        try:
            write_private(target, f"{redact_text(text).rstrip()}\n".encode())
        except OSError:
            target.unlink(missing_ok=True)
            raise
    except OSError as error:
        print_line(f"cannot write the failure report to {place}: {error}")
        return None
    return str(target)


def _next_free(place: Path) -> Path:
    """Create an empty file with the next free number; returns its path."""
    number = 1
    while True:
        target = place / f"failure_report_{number}.txt"
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return target
        except FileExistsError:
            number += 1
