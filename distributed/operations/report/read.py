"""Read ``record.jsonl``, with a note about each unreadable line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.errors import UserError
from distributed.operations.report.line_schema import is_known, parse_line
from distributed.operations.report.record_format import NAME, VERSION
from distributed.system.regular_files import read_limited
from distributed.system.strict_json import parse_json

_LARGEST = 1 << 29
"""Bytes of a record at most: hundreds of thousands of log steps."""
_NAMED = 5


@dataclass
class Record:
    """The lines of one file.

    Attributes:
        lines: lines in the order of the file; each has ``kind``, ``time`` and the keys of its kind.
        notes: descriptions of unreadable lines, one sentence each.
    """

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def record_path(path: Path) -> Path:
    """The record that `path`, a run's folder or the file itself, stands for.

    Raises:
        UserError: there is none; names records in folders below.
    """
    if path.is_file():
        return path
    if (path / NAME).exists():
        return path / NAME
    if not path.exists():
        raise UserError("no such directory", field="RUN", got=str(path), remedy="Check the path")
    below = sorted(found.parent for found in path.glob(f"*/{NAME}"))
    shown = ", ".join(map(str, below[:3]))
    raise UserError(
        f"no run record found here{f' (found some in {shown})' if below else ''}",
        field="RUN",
        got=str(path),
        allowed=f"a folder with {NAME}: a run's checkpoint_dir or tracking.record_dir",
        remedy="`python -m distributed.cli runs` lists the runs below a folder",
    )


def read_record(path: Path) -> Record:
    """Read the record that `path` stands for.

    Raises:
        UserError: there is none, it cannot be read, is not a run record, or a newer version's.
    """
    path = record_path(path)
    try:
        data = read_limited(path, _LARGEST)
    except OSError as error:
        raise UserError(
            f"the record cannot be read: {error.strerror or error}", field="RUN", got=str(path)
        ) from None
    record = Record(path.parent)
    *whole, rest = data.split(b"\n")
    bad: list[int] = []
    unknown: list[int] = []
    for number, text in enumerate([*whole, rest], 1):
        if not text.strip():
            continue
        found = _parsed(text)
        line = parse_line(found) if is_known(found) else None
        if line is not None:
            record.lines.append(line)
        elif number <= len(whole):
            (unknown if isinstance(found, dict) and not is_known(found) else bad).append(number)
        else:
            record.notes.append(
                "The last line is incomplete: the run is writing it, or was killed while writing it."
            )
    _check(record, path)
    record.notes += _note(bad, "cannot be read (damaged) and {are} left out")
    record.notes += _note(unknown, "{are} not of a kind that this version knows and {are} left out")
    return record


def _check(record: Record, path: Path) -> None:
    versions = [line["record"] for line in record.lines if isinstance(line.get("record"), int)]
    if not record.lines:
        raise UserError(
            "not a run record: no line could be parsed",
            field="RUN",
            got=str(path),
            allowed=f"a {NAME} written by a run",
        )
    if versions and max(versions) > VERSION:
        raise UserError(
            f"the record was written by a newer version: its format is {max(versions)}",
            field="RUN",
            got=str(path),
            allowed=f"formats up to {VERSION}",
            remedy="pip install --upgrade distributed-trainer",
        )


def _parsed(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _note(numbers: Sequence[int], what: str) -> list[str]:
    if not numbers:
        return []
    shown = ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
    one = len(numbers) == 1
    head = f"Line {shown} of the record" if one else f"{len(numbers)} lines of the record ({shown})"
    return [f"{head} {what.format(are='is' if one else 'are')}."]
