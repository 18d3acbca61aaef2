"""The supervisor with ranks that are small programs: who is named, what is left, what is shown."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from distributed.errors import UserError, WorkerError
from distributed.launch.supervisor import Supervisor
from distributed.resilience.failure_reports import FailureReport, is_second_hand

pytestmark = pytest.mark.starts_processes

Start = Callable[..., Supervisor]

# A rank that runs the program of its number, given as RANK_<n>; `report` is what a rank leaves.
RANK = """
import os, signal, sys
from distributed.launch.rank_process import report_error, watch_parent
from distributed.errors import UserError
from pathlib import Path
folder = Path(os.environ["DISTRIBUTED_RUN_DIR"])
def reached(name): (folder / name).touch()
watch_parent()
exec(os.environ["PROGRAM"])
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Start:
    def make(*programs: str) -> Supervisor:
        envs = {
            rank: {**os.environ, "RANK": str(rank), "PROGRAM": program, "DISTRIBUTED_RUN_DIR": str(tmp_path)}
            for rank, program in enumerate(programs)
        }
        return Supervisor([sys.executable, "-c", RANK], envs, tmp_path)

    return make


def failure(supervisor: Supervisor) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        supervisor.run()
    assert not any(psutil.pid_exists(pid) for pid in supervisor.pids)
    return caught.value


WAIT = "signal.pause()"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other ranks will say nothing anyway."""
    monkeypatch.setattr("distributed.launch.supervisor.GRACE", 0.1)


LOST = "report_error(RuntimeError('Connection closed by peer [127.0.0.1]:1'), folder); os._exit(1)"


def test_all_ranks_end_well(supervisor: Start, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = supervisor("print('from zero')", "print('from one'); print('and on stderr', file=sys.stderr)")
    ranks.run()
    out = capfd.readouterr().out
    assert "from zero\n" in out
    assert "[rank 1] from one\n" in out
    assert "[rank 1] and on stderr\n" in out


def test_a_killed_rank_is_named_and_not_the_one_that_lost_it(supervisor: Start) -> None:
    # Rank 0 reports and ends first; only then does rank 1 die, which has begun by then.
    lost = f"\nwhile not (folder / 'began').exists(): pass\n{LOST}"
    killed = "\nwhile not (folder / 'error_0.json').exists(): pass\nos.kill(os.getpid(), signal.SIGKILL)"
    error = failure(supervisor(lost, f"(folder / 'began').touch(){killed}"))
    assert (error.rank, error.exc_type) == (1, "SIGKILL")
    assert "was terminated by SIGKILL; the host may have run out of memory (rank 0 failed afterwards)" in str(
        error
    )


@pytest.mark.usefixtures("impatient")
def test_a_lost_connection_alone_points_at_the_others(supervisor: Start) -> None:
    error = failure(supervisor(LOST, WAIT))
    assert error.rank == 0
    assert "lost its connection to another rank; see that rank's output for the cause" in str(error)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("os._exit(3)", "exited with code 3 and left no report"),
        ("os.abort()", "was terminated by SIGABRT"),
        ("report_error(SystemExit(3), folder); os._exit(1)", "called sys.exit(3)"),
    ],
)
def test_how_a_rank_ended_is_said(supervisor: Start, program: str, said: str) -> None:
    error = failure(supervisor(WAIT, program))
    assert error.rank == 1
    assert said in str(error)


@pytest.mark.usefixtures("impatient")
def test_a_users_mistake_arrives_as_it_was_raised(supervisor: Start) -> None:
    program = (
        "report_error(UserError('wrong', field='f', got=3, allowed='1', remedy='Use 1'), folder); os._exit(1)"
    )
    with pytest.raises(UserError, match=r"f: wrong\. Got 3\. Allowed: 1\. Use 1\."):
        supervisor(program, WAIT).run()


def test_ranks_that_ignore_sigterm_and_their_children_are_ended(supervisor: Start, tmp_path: Path) -> None:
    stubborn = (
        "import subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "(folder / 'pid.tmp').write_text(str(child.pid)); os.rename(folder / 'pid.tmp', folder / 'pid')\n"
        "signal.pause()"
    )
    failure(supervisor(stubborn, "\nwhile not (folder / 'pid').exists(): pass\nos._exit(1)"))
    child = int((tmp_path / "pid").read_text())
    with suppress(ProcessLookupError):  # init has buried it
        ended, _, _ = select.select([os.pidfd_open(child)], [], [], 30)
        assert ended


def test_a_rank_whose_output_nobody_wants_goes_on(supervisor: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    ranks = supervisor("pass", "print('x' * 80 * 5000)")
    monkeypatch.setattr(sys, "stdout", Closed())
    ranks.run()


def test_ranks_end_with_a_killed_parent_and_remove_the_folder(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    rank = RANK.replace("exec(", "print('up', flush=True); exec(")
    parent = f"""
import os, sys
from pathlib import Path
from distributed.launch.supervisor import Supervisor
env = {{**os.environ, "RANK": "1", "PROGRAM": "signal.pause()", "DISTRIBUTED_RUN_DIR": {str(private)!r}}}
ranks = Supervisor([sys.executable, "-c", {rank!r}], {{1: env}}, Path({str(private)!r}))
ranks.start()
sys.stdout.write(f"{{ranks.pids[0]}}\\n")  # in one piece
sys.stdout.flush()
ranks.wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # The rank's line comes through a thread of the parent, before or after its own.
        first, second = sorted(process.stdout.readline() for _ in range(2))
        assert second == "[rank 1] up\n"
        ranks = [psutil.Process(int(first))]
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    assert not private.exists()


def test_only_losing_a_peer_is_second_hand() -> None:
    assert is_second_hand(RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:9"))
    assert is_second_hand(ConnectionResetError("Connection reset by peer"))
    assert not is_second_hand(ValueError("connection closed"))
    assert not is_second_hand(RuntimeError("peer review found no error"))


def test_a_report_of_a_report_keeps_the_rank() -> None:
    first = FailureReport.from_error(ValueError("bad"), 3).to_error()
    again = FailureReport.from_error(first, 0).to_error()
    assert isinstance(again, WorkerError)
    assert (again.rank, again.exc_type) == (3, "ValueError")
    assert str(again) == str(first)
