"""Group the lines of a record into runs, and add the failure reports beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.config.sections import local_path
from distributed.operations.report.formats import seconds
from distributed.operations.report.line_schema import printable
from distributed.operations.report.read import Record, read_record
from distributed.operations.report.record_format import NAME
from distributed.operations.report.runs import Attempt, Failure, Line, Run
from distributed.redaction import redact_text
from distributed.system.regular_files import read_limited

_LARGEST_REPORT = 1 << 24


def read_runs(path: Path) -> list[Run]:
    """The runs in one folder, oldest first: more than one when a folder was used again.

    Raises:
        UserError: as `read_record`.
    """
    record = read_record(path)
    runs = _group_runs(record)
    runs[-1].notes[:0] = record.notes
    _add_reports(runs, record.folder)
    for run in runs:
        if run.status == "interrupted" and run.attempts:
            run.failures.append(_silence(run) if run.unseen_host else _silent_end(run.attempts[-1]))
    return runs


def find_runs(folder: Path) -> Iterator[Path]:
    """Folders with a record at and below `folder`; unreadable folders are skipped."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        if NAME in files:
            yield Path(place)


def _group_runs(record: Record) -> list[Run]:
    runs: list[Run] = []
    attempts: dict[str, Attempt] = {}
    owners: dict[str, Run] = {}
    for line in record.lines:
        kind = line["kind"]
        if kind == "start":
            attempt = Attempt(line)
            attempts[line["attempt"]] = attempt
            if not runs or not _continues(runs[-1], attempt):
                runs.append(Run(record.folder))
            _begin(runs[-1], attempt)
            owners[line["run"]] = runs[-1]
        elif kind in ("restart", "end"):
            own = owners.get(str(line.get("run")))
            _conclude(own or _ended_early(runs, line, record.folder), line, own is not None)
        else:
            attempt = _attempt_of(line, attempts, runs, record)
            attempt.lines.append(line)
            if kind != "finish" and attempt is runs[-1].attempts[-1]:
                runs[-1].end_elsewhere = None
    return runs


def _begin(run: Run, attempt: Attempt) -> None:
    if run.attempts and run.end is None:
        before = run.attempts[-1]
        told = run.failures and run.failures[-1].time >= before.start.get("time", 0.0)
        if not told and not before.of("finish"):
            run.failures.append(_silent_end(before))
    run.attempts.append(attempt)
    run.end = run.end_elsewhere = None


def _silent_end(attempt: Attempt) -> Failure:
    return Failure(
        _last_time(attempt),
        f"The ranks ended after step {attempt.last_step} without writing a cause: they were killed together"
        " with their launcher, or the host went down.",
        step=attempt.last_step,
    )


def _silence(run: Run) -> Failure:
    """A failure for a run on another host that stopped writing."""
    last = run.attempts[-1]
    return Failure(
        _last_time(last),
        f"No line for {seconds(time.time() - run.last_seen)}, the last after step {last.last_step}. It ran on"
        f" {run.unseen_host}, which cannot be inspected from here: check on that host whether it still runs.",
        step=last.last_step,
    )


def _last_time(attempt: Attempt) -> float:
    return max(float(line.get("time", 0.0)) for line in (attempt.start, *attempt.lines))


def _conclude(run: Run, line: Line, own: bool) -> None:
    """Add a failure, or the end, reported by a caller of `fit`.

    Args:
        line: ``restart`` or ``end`` line.
        own: whether rank 0 was on the caller's host in some attempt. Another host may have been cut off,
            and the run continued without it.
    """
    error = line.get("error")
    elsewhere = not own and isinstance(error, dict) and bool(run.attempts) and run.several_nodes
    if elsewhere and line["kind"] == "end":
        run.end_elsewhere = line
    elif line["kind"] == "end":
        run.end = line
    if isinstance(error, dict):
        failure = _failure(error, line, fatal=line["kind"] == "end" and not elsewhere)
        same = _find_reported(run, failure, own)
        if same is None:
            run.failures.append(failure)
        else:
            known = run.failures[same]
            run.failures[same] = replace(
                known,
                details=known.details or failure.details,
                fatal=known.fatal or failure.fatal,
                reported_by=known.reported_by + failure.reported_by,
            )


def _failure(error: Line, line: Line, fatal: bool) -> Failure:
    rank, step = error.get("rank"), error.get("step")
    return Failure(
        line["time"],
        str(error.get("summary", "")),
        rank if isinstance(rank, int) and rank >= 0 else None,
        str(error.get("host") or ""),
        str(error.get("traceback") or ""),
        step if isinstance(step, int) else None,
        fatal,
        (str(line.get("run")),),
    )


def _find_reported(run: Run, failure: Failure, own: bool) -> int | None:
    """Index of the latest failure that another host reported with the same text.

    The same host twice means twice. So do two calls of `fit` that had rank 0: one resumed the other.
    """
    if not run.several_nodes:
        return None
    owners = {str(attempt.start.get("run")) for attempt in run.attempts} if own else {*failure.reported_by}
    for index in reversed(range(len(run.failures))):
        known = run.failures[index]
        if (
            known.reported_by
            and _content(known) == _content(failure)
            and owners.isdisjoint(known.reported_by)
        ):
            return index
    return None


def _content(failure: Failure) -> tuple[Any, ...]:
    return failure.rank, failure.host, failure.step, failure.summary


def _continues(run: Run, attempt: Attempt) -> bool:
    """Whether `attempt` continues `run`, or begins another in the same folder."""
    before, start = run.head, attempt.start
    if before.get("run") == start["run"]:
        return True
    place = start["place"]
    if attempt.step:
        same_process = start.get("processes", [])[1:] == (before.get("processes") or [])[1:]
        return bool(place.get("checkpoint")) or (same_process and attempt.step == run.steps)
    asked = next((value for name, value, _ in start["config"] if name == "resume_from_checkpoint"), False)
    return bool(asked) and run.status != "finished"


def _ended_early(runs: list[Run], line: Line, folder: Path) -> Run:
    """The run that a line belongs to whose ranks never started (or whose start is damaged)."""
    several = bool(runs) and runs[-1].several_nodes
    config = line.get("config") or []
    resumes = any(name == "resume_from_checkpoint" and value for name, value, _ in config)
    if runs and (several or resumes or "config" not in line):
        return runs[-1]
    runs.append(Run(folder))
    return runs[-1]


def _attempt_of(line: Line, attempts: dict[str, Attempt], runs: list[Run], record: Record) -> Attempt:
    found = attempts.get(line["attempt"])
    if found is None:
        found = attempts[line["attempt"]] = Attempt({})
        if not runs:
            runs.append(Run(record.folder))
        runs[-1].attempts.append(found)
        record.notes.append("The first line of an attempt is lost, so the step at which it began is unknown.")
    return found


def _add_reports(runs: list[Run], folder: Path) -> None:
    """Add the failure reports beside the record that no line mentions: of a stall, or of a run whose
    launcher was killed as well."""
    place = local_path(str(runs[-1].setting("checkpoint_dir") or "")) or folder
    folders = dict.fromkeys([folder, Path(place)])
    for path in sorted(path for found in folders for path in _reports_in(found)):
        run = next((run for run in reversed(runs) if _time_of(path) >= run.started), None)
        if run is None or any(path.name in f.summary or path.name in f.details for f in run.failures):
            continue
        try:
            text = read_limited(path, _LARGEST_REPORT).decode("utf-8", "replace")
        except OSError as error:
            run.notes.append(f"{path.name} cannot be read: {error.strerror}.")
            continue
        first, _, details = redact_text(printable(text)).partition("\n")
        run.failures.append(Failure(_time_of(path), f"{first} ({path.name})", details=details))
    for run in runs:
        run.failures.sort(key=lambda failure: failure.time)


def _reports_in(folder: Path) -> list[Path]:
    try:
        return list(folder.glob("failure_report_*.txt"))
    except OSError:  # a name that is too long, a folder on a lost disk
        return []


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
