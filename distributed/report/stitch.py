"""Puts the lines of a record together as runs, and adds the failure reports that lie beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from distributed.config.paths import local_path
from distributed.report.lines import NAME
from distributed.report.read import Record, read_record
from distributed.report.runs import Attempt, Failure, Line, Run

__all__ = ["find_runs", "read_runs"]


def read_runs(path: Path) -> list[Run]:
    """The runs in one folder, oldest first: more than one when a folder was used again.

    Raises:
        UserError: as `read_record`.
    """
    record = read_record(path)
    runs = _told(record)
    runs[-1].notes[:0] = record.notes
    _add_reports(runs, record.folder)
    for run in runs:
        if run.status == "interrupted" and run.attempts:
            run.failures.append(_silent_end(run.attempts[-1]))
    return runs


def find_runs(folder: Path) -> Iterator[Path]:
    """Folders with a record at and below `folder`; what may not be entered is passed over."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        if NAME in files:
            yield Path(place)


def _told(record: Record) -> list[Run]:
    """Put the lines of a record together as runs."""
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
            run = owners.get(str(line.get("run"))) or _ended_early(runs, line, record.folder)
            _conclude(run, line)
        else:
            _attempt_of(line, attempts, runs, record).lines.append(line)
    return runs


def _begin(run: Run, attempt: Attempt) -> None:
    if run.attempts and run.end is None:
        before = run.attempts[-1]
        told = run.failures and run.failures[-1].time >= before.start.get("time", 0.0)
        if not told and not before.of("finish"):
            run.failures.append(_silent_end(before))
    run.attempts.append(attempt)
    run.end = None


def _silent_end(attempt: Attempt) -> Failure:
    last = max([attempt.start, *attempt.lines], key=lambda line: line.get("time", 0.0))
    return Failure(
        last.get("time", 0.0),
        f"The ranks ended after step {attempt.last_step} and left no word of why: they were killed together"
        " with what started them, or the host went down.",
        step=attempt.last_step,
    )


def _conclude(run: Run, line: Line) -> None:
    fatal = line["kind"] == "end"
    if fatal:
        run.end = line
    error = line.get("error")
    if isinstance(error, dict):
        rank, step = error.get("rank"), error.get("step")
        run.failures.append(
            Failure(
                line["time"],
                str(error.get("summary", "")),
                rank if isinstance(rank, int) and rank >= 0 else None,
                str(error.get("host") or ""),
                str(error.get("traceback") or ""),
                step if isinstance(step, int) else None,
                fatal,
            )
        )


def _continues(run: Run, attempt: Attempt) -> bool:
    """Whether `attempt` goes on with `run`, or begins another in the same folder."""
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
    several = bool(runs) and (runs[-1].place.get("num_nodes") or 1) > 1
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
        record.notes.append("The first line of an attempt is lost, and with it where that attempt began.")
    return found


def _add_reports(runs: list[Run], folder: Path) -> None:
    """Add the failure reports beside the record that no line tells of: of a stall, or of a run whose
    launcher was killed as well."""
    place = local_path(str(runs[-1].setting("checkpoint_dir") or "")) or folder
    folders = dict.fromkeys([folder, Path(place)])
    for path in sorted(path for found in folders for path in found.glob("failure_report_*.txt")):
        run = next((run for run in reversed(runs) if _time_of(path) >= run.started), None)
        if run is None or any(path.name in f.summary or path.name in f.details for f in run.failures):
            continue
        try:
            first, _, details = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        except OSError as error:
            run.notes.append(f"{path.name} cannot be read: {error.strerror}.")
            continue
        run.failures.append(Failure(_time_of(path), f"{first} ({path.name})", details=details))
    for run in runs:
        run.failures.sort(key=lambda failure: failure.time)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
