"""What an elastic host does between rounds: it starts clean, and hears that it is to go."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed import DistributedConfig, Preempted, UserError, WorkerError
from distributed.interfaces.launcher import RankCommand
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.launch.supervisor import Supervisor
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.resilience.elastic import Elastic, SingleHost
from distributed.resilience.phase_journal import Journal
from distributed.resilience.rank_monitor import Limits, RankMonitor
from distributed.resilience.stack_dumps import stack_path
from distributed.system.output import print_line

GONE = WorkerError("gone", rank=0, host="h", exc_type="SIGKILL")


def plan(folder: Path, **given: Any) -> RunPlan:
    options = {"device": "cpu", "batch_size": 4, "num_processes": 2, "checkpoint_dir": str(folder)}
    options["elastic"] = {"max_restarts": 2}
    return resolve(DistributedConfig(**(options | given)), get_catalog(), Facts(), Resources())


def elastic(folder: Path, rounds: list[Callable[[Any], None]], members: Any = None) -> Elastic:
    """A run whose rounds are these functions of their supervisor's stand-in."""
    left = iter(rounds)

    def supervise(plan: RunPlan, host: str, port: int) -> Any:
        supervisor = SimpleNamespace(received_signal=None, request_stop=None)
        supervisor.run = lambda: next(left)(supervisor)
        return supervisor

    command = RankCommand(["none"], folder)
    members = members or SingleHost([2])
    return Elastic(plan(folder / "saved"), command, supervise, members, lambda plan, *_: plan)


def test_new_ranks_are_not_judged_by_what_those_before_them_left(tmp_path: Path) -> None:
    watch = RankMonitor(tmp_path, Limits(stall_report=0.05, hang_timeout=0.1))
    here = {0: os.getpid()}

    def dies(_: Any) -> None:
        journal = Journal(tmp_path, 0)
        journal.begin()
        journal.enter("forward", step=5)
        stack_path(tmp_path, 0).write_text("Fatal Python error: of an earlier round")
        (tmp_path / "verdict.json").write_text("{}")
        raise GONE

    def starts(_: Any) -> None:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:  # longer than a hang may last
            watch.look(here)
        assert sorted(path.name for path in tmp_path.glob("*_0")) == []
        assert not (tmp_path / "verdict.json").exists()

    elastic(tmp_path, [dies, starts]).run()


class Waits(SingleHost):
    """Is told to go while it waits for the others of the second round."""

    rounds = 0

    def meet(self) -> Any:
        self.rounds += 1
        if self.rounds == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            raise AssertionError("the signal was not heard")
        return super().meet()


def test_told_to_go_between_rounds_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def dies(_: Any) -> None:
        raise GONE

    with pytest.raises(Preempted) as caught:
        elastic(tmp_path, [dies], Waits([2])).run()
    assert (caught.value.code, caught.value.signal, caught.value.step) == (75, "SIGUSR1", 0)
    assert (
        "stopped by SIGUSR1 before the first checkpoint; rerun the same command to start over"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("kind", "raised"), [("OSError", WorkerError), ("HostLost", Preempted)])
def test_who_was_told_to_go_starts_no_further_round(
    tmp_path: Path, kind: str, raised: type[BaseException]
) -> None:
    """What could not be saved is told; that another host went first is no failure of this one's."""

    def told_and_dies(supervisor: Any) -> None:
        supervisor.received_signal = "SIGTERM"
        raise WorkerError("no space left", rank=0, host="h", exc_type=kind)

    with pytest.raises(raised):
        elastic(tmp_path, [told_and_dies]).run()


def test_told_to_go_after_the_last_round_changes_nothing(tmp_path: Path) -> None:
    class Leaves(SingleHost):
        @contextmanager
        def watch(self, newcomer: Callable[[], None]) -> Iterator[None]:
            yield
            os.kill(os.getpid(), signal.SIGTERM)

        def finish(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    elastic(tmp_path, [lambda _: None], Leaves([2])).run()


def test_hosts_that_come_and_go_need_the_signal(tmp_path: Path) -> None:
    several = {"num_nodes": 2, "rdzv_endpoint": "h:1", "num_processes": 4}
    with pytest.raises(UserError, match=r"checkpoint.on_signal: .*Allowed: true for an elastic run"):
        plan(tmp_path, elastic={"min_nodes": 1}, checkpoint={"on_signal": False}, **several)
    assert plan(tmp_path, elastic={"min_nodes": 1}, **several).counts == (4, 2)
    assert plan(tmp_path, checkpoint={"on_signal": False}).counts == (2,)


@pytest.mark.starts_processes
@pytest.mark.real_start
def test_a_rank_that_was_being_started_is_told_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the first rank is started, when there is nobody to pass it on to."""
    started = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        process = started(*args, **options)
        if not told:
            told.append(process.pid)
            os.kill(os.getpid(), signal.SIGUSR1)
        return process

    told: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", popen)
    code = (
        "import signal, sys\n"
        "from distributed.resilience.preemption import install_handlers, received_signal\n"
        "install_handlers()\n"
        "while not received_signal(): signal.pause()"
    )
    supervisor = Supervisor(
        [sys.executable, "-c", code],
        {rank: dict(os.environ) for rank in (0, 1)},
        tmp_path,
        heeds_signals=True,
    )
    supervisor.run()
    assert supervisor.received_signal == "SIGUSR1"


def test_a_report_that_nobody_hears_ends_nothing() -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    said = Closed()
    print_line("rank 0 has made no progress", said)
    assert said.getvalue() == "rank 0 has made no progress\n"
    said.close()
    print_line("it still has not", said)
