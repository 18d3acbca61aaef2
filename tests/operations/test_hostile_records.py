"""Records that no run has written: a listing has a row for each, and none ends it or makes it wait."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from distributed.commands import runs
from distributed.errors import UserError
from distributed.operations.report.record_format import NAME
from distributed.operations.report.stitch import read_runs
from tests.campaigns.hostile_records import BAD, outcomes_of, valid_lines


@pytest.mark.slow
def test_hostile_records_are_read_with_notes_or_refused(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, range(60), seed=1)
    assert [outcome for outcome in outcomes if outcome.verdict in BAD] == []
    assert sum(outcome.verdict == "read" for outcome in outcomes) > 30


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir()
    (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_listing_with_a_pipe_a_device_and_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "good", valid_lines())
    for name in ("pipe", "device", "loop"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / NAME)
    (tmp_path / "device" / NAME).symlink_to("/dev/zero")
    (tmp_path / "loop" / NAME).symlink_to(NAME)
    runs.run(argparse.Namespace(folder=str(tmp_path), json=True))
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["good"]["status"] == "finished"
    for name, problem in {"pipe": "a named pipe", "device": "a device", "loop": "no run record"}.items():
        assert rows[name]["status"] == "unreadable"
        assert problem in rows[name]["problem"]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("start", "time", 1e300),
        ("start", "place", {"hosts": None}),
        ("start", "place", {"world_size": "two"}),
        ("log", "step", 10**30),
        ("log", "figures", []),
        ("end", "totals", {"total_time": "long"}),
        ("restart", "error", {"summary": []}),
    ],
)
def test_a_line_of_another_form_is_left_out(tmp_path: Path, kind: str, name: str, value: Any) -> None:
    lines = valid_lines()
    place = next(at for at, line in enumerate(lines) if line["kind"] == kind)
    lines[place][name] = value
    write(tmp_path / "run", lines)
    notes = " ".join(note for run in read_runs(tmp_path / "run") for note in run.notes)
    assert f"Line {place + 1} of the record cannot be read" in notes


def test_text_that_would_move_the_cursor(tmp_path: Path) -> None:
    lines = valid_lines()
    lines[0]["name"] = lines[5]["error"]["summary"] = "\x1b[2J\ud800 new"
    write(tmp_path / "run", lines[:6])
    (run,) = read_runs(tmp_path / "run")
    assert run.name == run.failures[0].summary == "\ufffd[2J\ufffd new"


def test_a_record_that_is_too_large(tmp_path: Path) -> None:
    write(tmp_path / "run", [])
    os.truncate(tmp_path / "run" / NAME, 1 << 40)
    with pytest.raises(UserError, match=r"cannot be read: it has 1,099,511,627,776 bytes, and at most"):
        read_runs(tmp_path / "run")
