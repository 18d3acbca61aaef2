"""`runs` lists what lies below a folder, and can tell a run that lives from one that was killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.cli import main
from distributed.report.lines import NAME
from tests.core.record_support import write_attempt, write_end


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["runs", *words, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def process(pid: int) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": pid, "created": psutil.Process(pid).create_time()}


def status_of(folder: str, capsys: pytest.CaptureFixture[str]) -> str:
    return str({row["path"]: row for row in listed(capsys)}[folder]["status"])


def test_runs_are_found_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old", "deep/er/new"):
        write_attempt(Path(name))
        write_end(Path(name))
        time.sleep(0.002)  # the clock's steps are told in milliseconds
    write_attempt(Path("failed"))
    write_end(Path("failed"), status="failed", reason=None)
    rows = listed(capsys)
    assert [row["path"] for row in rows] == ["failed", "deep/er/new", "old"]
    assert [row["status"] for row in rows] == ["failed", "finished", "finished"]
    assert (rows[1]["backend"], rows[1]["ranks"], rows[1]["step"]) == ("pytorch-ddp", 2, 50)
    assert [row["path"] for row in listed(capsys, "deep")] == ["er/new"]
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "deep/er/new" in out
    assert "finished" in out


def test_nothing_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys) == []
    assert main(["runs"]) == 0
    assert "no run has left a record" in capsys.readouterr().out
    assert main(["runs", "nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_record_that_cannot_be_read_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("good"))
    Path("theirs").mkdir()
    Path("theirs", NAME).write_text('{"event": "login"}\n')
    rows = {row["path"]: row for row in listed(capsys)}
    assert rows["theirs"]["status"] == "unreadable"
    assert "no record of a run" in rows["theirs"]["problem"]
    assert rows["good"]["status"] == "finished"


def test_a_run_without_an_end_runs_as_long_as_its_process_lives(capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_attempt(Path("run"), finish=None, process=process(child.pid))
    assert status_of("run", capsys) == "running"
    child.communicate(b"\n")
    assert status_of("run", capsys) == "interrupted"


def test_another_process_with_the_same_number_is_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    own = process(os.getpid())
    write_attempt(Path("run"), finish=None, process={**own, "created": own["created"] - 100.0})
    assert status_of("run", capsys) == "interrupted"


def test_a_run_on_another_host_is_gone_when_it_has_been_silent(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("run"), finish=None, process={"host": "elsewhere", "pid": 1, "created": 0.0})
    assert status_of("run", capsys) == "running"
    texts = [json.loads(text) for text in Path("run", NAME).read_text().splitlines()]
    old = [json.dumps({**line, "time": line["time"] - 3600}) for line in texts]
    Path("run", NAME).write_text("\n".join(old) + "\n")
    assert status_of("run", capsys) == "interrupted"


def test_a_run_that_was_told_to_go_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("run"), finish="stopped")
    write_end(Path("run"), status="stopped", reason="SIGTERM")
    (row,) = listed(capsys)
    assert (row["status"], row["reason"]) == ("stopped", "SIGTERM")
