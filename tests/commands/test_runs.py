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
from distributed.operations.report.record_format import NAME, append
from tests.support.records import one_run, write_attempt, write_end


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
    assert "no run record found" in capsys.readouterr().out
    assert main(["runs", "nowhere"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_a_record_that_cannot_be_read_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("good"))
    Path("theirs").mkdir()
    Path("theirs", NAME).write_text('{"event": "login"}\n')
    rows = {row["path"]: row for row in listed(capsys)}
    assert rows["theirs"]["status"] == "unreadable"
    assert "not a run record" in rows["theirs"]["problem"]
    assert rows["good"]["status"] == "finished"


@pytest.mark.starts_processes
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


ELSEWHERE = {"host": "elsewhere", "pid": 1, "created": 0.0}


def spread(folder: str, pause: float, silence: float) -> None:
    """As if the lines were `pause` seconds apart, and the last one `silence` seconds old."""
    texts = [json.loads(text) for text in Path(folder, NAME).read_text().splitlines()]
    last = time.time() - silence
    old = [{**line, "time": last - pause * back} for back, line in enumerate(reversed(texts))]
    Path(folder, NAME).write_text("".join(json.dumps(line) + "\n" for line in reversed(old)))


@pytest.mark.parametrize(
    ("pause", "silence", "status"),
    [
        (1, 500, "running"),
        (1, 700, "interrupted"),
        (900, 2600, "running"),
        (900, 2800, "interrupted"),
    ],
)
def test_a_run_on_another_host_is_gone_when_it_has_been_silent_for_long(
    pause: float, silence: float, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For three of its own pauses, of one that writes seldom."""
    write_attempt(Path("run"), finish=None, process=ELSEWHERE)
    spread("run", pause, silence)
    assert status_of("run", capsys) == status


def test_a_run_that_cannot_be_seen_from_here_is_not_said_to_have_been_killed() -> None:
    write_attempt(Path("run"), finish=None, process=ELSEWHERE)
    spread("run", 1, 3600)
    (failure,) = one_run(Path("run")).failures
    assert "No line for 1 h 0 min, the last after step 50." in failure.summary
    assert "It ran on elsewhere, which cannot be inspected from here" in failure.summary


def test_a_run_that_was_told_to_go_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(Path("run"), finish="stopped")
    write_end(Path("run"), status="stopped", reason="SIGTERM")
    (row,) = listed(capsys)
    assert (row["status"], row["reason"]) == ("stopped", "SIGTERM")


# -- several hosts -----------------------------------------------------------------------------------

LOST = {"summary": "rank 1 on beta was lost", "rank": 1, "host": "beta", "step": 18}
TWO: dict[str, Any] = {"num_nodes": 2, "backend": "pytorch-ddp", "world_size": 2}


def log(attempt: str, step: int = 60) -> None:
    append("run", "log", {"attempt": attempt, "step": step, "figures": {"loss": 0.1}})


def begin(attempt: str, **options: Any) -> None:
    """An attempt on two hosts, of the `fit` "a" of rank 0's."""
    options = {"place": TWO, "run": "a", "finish": None, "process": ELSEWHERE, **options}
    write_attempt(Path("run"), attempt, **options)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_host_that_was_cut_off_does_not_make_a_finished_run_a_failed_one(nodes: int) -> None:
    """It tells of its end when the others have long started again, perhaps on one host alone."""
    begin("1")
    append("run", "restart", {"run": "a", "error": LOST})
    place = {**TWO, "num_nodes": nodes, "step": 10, "checkpoint": "step_00000010"}
    begin("2", place=place)
    write_end(Path("run"), "b", "failed", error=LOST, place=TWO, config=[])
    log("2")
    assert one_run(Path("run")).status == "running"
    append("run", "finish", {"attempt": "2", "status": "finished"})
    run = one_run(Path("run"))
    assert run.status == "finished"
    assert [failure.fatal for failure in run.failures] == [False]
    write_end(Path("run"), "a")
    write_end(Path("run"), "c", "failed", error={"summary": "alone"}, place=TWO, config=[])
    run = one_run(Path("run"))
    assert run.status == "finished"
    assert [failure.fatal for failure in run.failures] == [False, False]


@pytest.mark.parametrize("hosts", ["ab", "ba"])
def test_a_failure_that_every_host_tells_of_is_listed_once(hosts: str) -> None:
    """And one that comes again is another."""
    begin("1")
    for host in hosts:
        append("run", "restart", {"run": host, "error": LOST})
    begin("2")
    for host in hosts:
        error = {**LOST, "traceback": "here" if host == "b" else ""}
        write_end(Path("run"), host, "failed", error=error, place=TWO, config=[])
    run = one_run(Path("run"))
    assert run.status == "failed"
    assert [(failure.fatal, failure.details) for failure in run.failures] == [(False, ""), (True, "here")]
    begin("3", run="c", place={**TWO, "step": 10, "checkpoint": "step_00000010"})
    for host in ("c", "d"):
        write_end(Path("run"), host, "failed", error=LOST, place=TWO, config=[])
    assert len(one_run(Path("run")).failures) == 3


def test_hosts_whose_ranks_never_start_are_one_failed_run() -> None:
    for host in "ab":
        write_end(Path("run"), host, "failed", error=LOST, place=TWO, config=[])
    run = one_run(Path("run"))
    assert run.status == "failed"
    assert [failure.fatal for failure in run.failures] == [True]


def test_when_the_host_of_rank_0_is_gone_the_others_say_how_it_ended() -> None:
    begin("1")
    write_end(Path("run"), "b", "failed", error=LOST, place=TWO, config=[])
    spread("run", 1, 3600)
    run = one_run(Path("run"))
    assert run.status == "failed"
    assert [failure.summary for failure in run.failures] == [LOST["summary"]]
