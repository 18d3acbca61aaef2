"""Hangs, crashes and divergence on real ranks: who is named, where, how soon, and that nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from mmap import mmap
from pathlib import Path
from stat import S_IMODE
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from distributed import WorkerError
from distributed.registry.catalog import get_catalog
from distributed.resilience import phase_journal as journal
from distributed.resilience import rank_monitor
from distributed.resilience.divergence import checksum, trained
from distributed.resilience.hang_diagnosis import RankSnapshot, diagnose
from distributed.resilience.phase_journal import FAILED, RUNNING, Entry, Journal
from distributed.resilience.rank_monitor import Limits, RankMonitor, write_report
from distributed.resilience.stack_dumps import Frame, parse
from distributed.system.output import print_line
from tests.campaigns.failure_reports import CASES, RANK, Case, fail, shorten
from tests.support import commands
from tests.support.ports import free_port
from tests.support.processes import children, started_since
from tests.support.training import OnStep, make_trainer

HOST = os.uname().nodename
SOON = 30.0
"""Seconds from the fault until its report is written. What the error adds on memory comes later: a process
predicts it, which may first import a framework."""


@pytest.mark.starts_processes
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_who_failed_is_named(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = children()
    with pytest.raises(WorkerError) as caught:
        fail(case, str(tmp_path / "mark"), checkpoint_dir=str(tmp_path / "checkpoints"))
    error = caught.value
    assert (error.rank, error.phase, error.step, error.exc_type) == (
        RANK,
        case.phase,
        case.step,
        case.exc_type,
    )
    assert f"rank {RANK} ({HOST}, pid " in error.summary
    assert started_since(before) == set()
    report = max((tmp_path / "checkpoints").glob("failure_report_*.txt"), key=lambda p: p.stat().st_mtime_ns)
    assert report.stat().st_mtime - float((tmp_path / "mark").read_text()) < SOON
    assert S_IMODE(report.stat().st_mode) == 0o600
    assert error.summary.partition(". ")[0].partition(" (rank")[0] in report.read_text()
    if case.exc_type == "Hang":
        # Told before it was ended for it, and without ending it.
        assert f"rank {RANK} ({HOST}, pid " in capfd.readouterr().err
        assert "The run was stopped (hang_timeout)" in error.summary
    if case.name == "loader worker":
        assert "failure_reports.py" in error.worker_traceback.partition("loader worker")[2]
    if case.name == "memory":
        assert "ran out of memory within its limit of" in error.summary
    if case.name == "diverged":
        assert "the first parameter that differs is 'second.bias'" in error.summary


SCRIPT = """
import os, sys
from pathlib import Path
from tests.campaigns.failure_reports import CASES, fail
Path(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
fail(CASES[sys.argv[1]], "mark", num_processes=None, checkpoint_dir="checkpoints")
"""


@pytest.mark.parametrize("name", ["callback", "killed", "raised"])
def test_ranks_that_torchrun_started(name: str, tmp_path: Path, forking_python: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    if name == "callback":
        command.append("--standalone")
    else:
        command += ["--master-port", str(free_port())]
        env["PYTHON_EXEC"] = str(forking_python)
    done = commands.run(
        [*command, "script.py", name],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        fresh=name == "callback",
    )
    pid = int((tmp_path / "rank-1").read_text())
    where = "forward of step 3" if name == "raised" else "a callback after step 3"
    said = [line for line in done.stderr.splitlines() if line.startswith(f"rank 1 ({HOST}, pid {pid})")]
    assert where in said[-1]
    assert name != "callback" or "The run was stopped (hang_timeout)" in said[-1]
    assert done.returncode == 1
    reports = [path.read_text() for path in (tmp_path / "checkpoints").glob("failure_report_*.txt")]
    assert any(where in text for text in reports)
    # The watcher's folder goes with it, and it with the ranks.
    assert _await(lambda: not list(tmp_path.glob("distributed-watch-*")))
    assert _await(lambda: not [p for p in psutil.process_iter() if _works_in(p, tmp_path)])


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _await(condition) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.starts_processes
def test_a_slow_rank_is_reported_and_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It computes and no other rank waits: the run continues, and so do the reports about it."""
    reported = tmp_path / "reported"

    def note(text: str) -> None:
        print_line(text)
        if f"rank 0 ({HOST}) is making progress again" in text:
            reported.touch()

    monkeypatch.setattr(rank_monitor, "print_line", note)
    trainer = make_trainer(
        nn.Linear(4, 2),
        launch="spawn",
        batch_size=4,
        stall_report=0.2,
        hang_timeout=2.0,
        training_step=_compute_once,
        callbacks=[OnStep(partial(_stop_if_there, reported))],
    )
    # The monitor reports progress at its next poll, which may come steps later on a busy machine.
    history = trainer.fit((torch.ones(16, 4), torch.zeros(16, dtype=torch.long)), epochs=1_000_000)
    assert history.stop_reason == "the progress was reported"
    assert "computing in forward of step 3 (epoch 0)" in capfd.readouterr().err


def _stop_if_there(path: Path, context: Any) -> None:
    if path.exists():
        context.request_stop("the progress was reported")


_calls = [0]


def _compute_once(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    _calls[0] += 1
    started = time.process_time()
    while _calls[0] == 3 and time.process_time() - started < 3.0:
        pass
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# -- who is to blame, from places alone -------------------------------------------------

BLOCKING = get_catalog().backends["horovod"].blocking_modules
WAITS = [Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce")]
BACKWARD = [Frame("/x/torch/autograd/graph.py", 1, "_engine_run_backward")]
WORKS = [Frame("/home/me/model.py", 1, "forward")]


def snapshot(rank: int, phase: str, step: int, stack: list[Frame], age: float = 9.0) -> RankSnapshot:
    entry = Entry(phase, phase, "", step, 0, 1, 0, 0.0, RUNNING, 1, 1)
    return RankSnapshot(rank, "h", 1, entry, age, stack=stack, blocking_modules=BLOCKING)


@pytest.mark.parametrize(
    ("ranks", "culprits", "kind"),
    [
        ([("backward", 3, BACKWARD), ("data", 3, WORKS)], [1], "late"),
        ([("callback", 2, WORKS), ("backward", 3, BACKWARD), ("backward", 3, WAITS)], [0], "late"),
        # One may compute in backward while others wait there.
        ([("backward", 3, BACKWARD), ("backward", 3, WORKS)], [1], "late"),
        # Of two that do not come, the one that is further back.
        ([("forward", 3, WORKS), ("data", 3, WORKS), ("backward", 3, BACKWARD)], [1], "late"),
        ([("forward", 3, WORKS), ("forward", 3, WORKS)], [0], "alone"),
        ([("backward", 3, BACKWARD), ("backward", 3, BACKWARD)], [], "together"),
        ([("callback", 3, WAITS), ("backward", 4, BACKWARD), ("callback", 3, WAITS)], [1], "apart"),
        ([("callback", 3, WAITS), ("backward", 4, BACKWARD), ("backward", 4, BACKWARD)], [0], "apart"),
        # Of two, the one that went on; but of two whose data differ, the one with less.
        ([("callback", 3, WAITS), ("backward", 4, BACKWARD)], [1], "apart"),
        ([("epoch end", 3, WAITS), ("backward", 4, BACKWARD)], [0], "apart"),
    ],
)
def test_the_judgement(ranks: list[tuple[str, int, list[Frame]]], culprits: list[int], kind: str) -> None:
    diagnosis = diagnose([snapshot(rank, *what) for rank, what in enumerate(ranks)])
    assert (list(diagnosis.culprits), diagnosis.kind) == (culprits, kind)


# -- the parts ----------------------------------------------------------------------------


def test_a_journal_tells_the_last_phase(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 3)
    journal.begin()
    journal.enter("data", 7, 1)
    assert journal.enter("callback") == "data"
    assert journal.enter_collective("all_reduce") == "callback"
    entry = Entry.read(Journal.path(tmp_path, 3))
    assert entry is not None
    assert (entry.phase, entry.outer, entry.step, entry.epoch) == ("communication", "callback", 7, 1)
    assert (
        entry.place()
        == "all_reduce (collective number 1 of this rank), called in a callback after step 7 (epoch 1)"
    )
    journal.end(FAILED)
    journal.enter("finish")
    last = Entry.read(Journal.path(tmp_path, 3))
    assert last is not None
    assert (last.phase, last.status) == ("communication", FAILED)
    assert S_IMODE(Journal.path(tmp_path, 3).stat().st_mode) == 0o600


def test_a_rank_that_is_held_up_in_writing_does_not_look_as_if_it_had_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a crowded host the watch may look while a record is half written: of its age it must not be
    deceived, which of an empty record would be that of the host."""
    ages: list[float] = []

    class Slow:
        """A mapping that is written byte by byte; the watch looks after each."""

        def __init__(self, descriptor: int, size: int) -> None:
            self.memory = mmap(descriptor, size)

        def __setitem__(self, place: slice, record: bytes) -> None:
            for index, byte in enumerate(record, place.start or 0):
                self.memory[index] = byte
                found = Entry.read(Journal.path(tmp_path, 0))
                if found is not None and found.status == RUNNING and found.phase != "idle":
                    ages.append(time.perf_counter() - found.since)

    monkeypatch.setattr(journal, "mmap", SimpleNamespace(mmap=Slow))
    own = Journal(tmp_path, 0)
    own.begin()
    own.enter("forward", step=1)
    assert ages
    assert max(ages) < 60


@pytest.mark.timeout(60)
def test_a_rank_that_moves_while_it_is_asked_has_not_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, own, asked = (
        RankMonitor(tmp_path, Limits(stall_report=None, hang_timeout=0.2)),
        Journal(tmp_path, 0),
        [],
    )
    own.begin()
    see = watch.see

    def moves(*args: Any, **options: Any) -> list[RankSnapshot]:
        asked.append(own.enter("forward", step=3))
        return see(*args, **options)

    def look_until(happened: Callable[[], object], pid: int) -> None:
        while not happened():
            watch.look({0: pid})

    # Who computes has not hung either, so another process, which sleeps, stands for the rank.
    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(watch, "see", moves)
                look_until(lambda: asked, rank.pid)
            with pytest.raises(WorkerError, match=r"has made no progress for .* forward of step 3"):
                look_until(lambda: False, rank.pid)
        finally:
            rank.kill()


ON_A_CORE = """
import os, sys, threading
os.sched_setaffinity(0, {%d})
print(flush=True)  # before it starves: a busy machine would take minutes to run it then
if sys.argv[1] == "starved":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
while sys.argv[1] == "busy":
    pass
"""


@pytest.mark.starts_processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("starved", [True, False], ids=["no core", "blocked"])
def test_a_start_that_waits_for_a_core_has_not_hung(
    starved: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ranks wait in one place, the first one longer; a thread of the second could run."""
    watch = RankMonitor(tmp_path, Limits(stall_report=None, hang_timeout=2.0))
    program = [sys.executable, "-c", ON_A_CORE % min(os.sched_getaffinity(0))]
    with ExitStack() as stack:

        def begin(command: list[str]) -> int:
            started = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(started.kill)
            return started.pid if command[0] == "sleep" else len(started.stdout.readline()) and started.pid

        pids = {0: begin(["sleep", "600"]), 1: begin([*program, "starved"] if starved else ["sleep", "600"])}
        begin([*program, "busy"])  # last, and so the first that is ended: without a core, none ends
        for rank in pids:
            own = Journal(tmp_path, rank)
            own.begin()
            own.enter("setup")
            own.enter_collective("all_reduce")
        if not starved:
            with pytest.raises(WorkerError, match="before the first step"):
                _look_until(watch, pids, lambda: False)
            return
        _look_until(watch, pids, lambda: "have been blocked" in capfd.readouterr().err)


def _look_until(watch: RankMonitor, pids: dict[int, int], happened: Callable[[], bool]) -> None:
    watch.look(pids)
    while not happened():
        time.sleep(watch.period)
        watch.look(pids)


def test_the_stack_of_the_wanted_thread() -> None:
    text = (
        'Thread 0x00000000000000aa (most recent call first):\n  File "a.py", line 1 in other\n\n'
        'Current thread 0x00000000000000bb (most recent call first):\n  File "b.py", line 2 in inner\n'
        '  File "b.py", line 3 in <module>\n'
    )
    assert parse(text, 0xAA) == [Frame("a.py", 1, "other")]
    assert parse(text)[0] == Frame("b.py", 2, "inner")


def test_any_changed_bit_changes_the_checksum() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, dtype=torch.bfloat16))
    before = checksum(trained(model))
    assert before == int(before) < 2**52
    assert checksum(trained(model)) == before
    with torch.no_grad():
        for parameter in model.parameters():
            kept = parameter.clone()
            parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9, dtype=kept.dtype))
            assert checksum(trained(model)) != before
            parameter.copy_(kept)
    model[1].running_mean[0] += 1  # type: ignore[index, operator]
    assert checksum(trained(model)) == before


def test_reports_are_numbered_and_private(tmp_path: Path) -> None:
    assert [write_report(str(tmp_path), text) for text in "ab"] == [
        str(tmp_path / f"failure_report_{number}.txt") for number in (1, 2)
    ]
    assert (tmp_path / "failure_report_2.txt").read_text() == "b\n"
    assert {S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert write_report(str(tmp_path / "failure_report_1.txt"), "no folder") is None


def test_examples_show_no_layout() -> None:
    assert shorten('File "/home/me/venv/torch/nn/linear.py", line 1') == 'File "torch/nn/linear.py", line 1'
