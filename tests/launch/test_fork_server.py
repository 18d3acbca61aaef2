"""A forked process is what a fresh one would be."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from distributed.launch import child_process
from distributed.launch.child_process import ForkedProcess
from distributed.launch.fork_server import ForkServer
from distributed.launch.forked import ADDRESS, ForkRequest
from tests.support import commands

pytestmark = pytest.mark.starts_processes

STATE = """
import gc, json, os, resource, signal, sys, threading
json.dump({
    "argv": sys.argv, "name": __name__, "cwd": os.getcwd(), "path": [p for p in sys.path if p != "@"],
    "env": dict(os.environ), "session": os.getsid(0) == os.getpid(), "threads": threading.active_count(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)],
    "wakeup": signal.set_wakeup_fd(-1), "cpus": sorted(os.sched_getaffinity(0)), "gc": gc.get_threshold(),
    "files": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "scratch": __import__("tempfile").gettempdir(), "zone": __import__("time").tzname,
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE), "main": "STATE" in vars(sys.modules["__main__"]),
    "threads_of_torch": __import__("torch").get_num_threads(),
}, sys.stdout)
"""
TORCH = '    "threads_of_torch": __import__("torch").get_num_threads(),\n'


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["torch", "numpy.random", "tempfile:gettempdir"]) as server:
        yield server


def state(words: list[str], env: dict[str, str], folder: Path) -> dict[str, object]:
    done = commands.run([sys.executable, *words], env=env, cwd=folder, capture_output=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("threads", [None, "1"])
@pytest.mark.parametrize("form", ["code", "safe code", "module", "script"])
def test_a_fork_has_the_state_of_a_fresh_process(
    server: ForkServer, tmp_path: Path, form: str, threads: str | None
) -> None:
    # Threads of torch, whose import takes seconds, are the same however the code is given.
    program = STATE if form == "code" else STATE.replace(TORCH, "")
    (tmp_path / "its_state.py").write_text(program)
    words = {
        "code": ["-c", program, "a", "b c"],
        "safe code": ["-P", "-c", program],
        "module": ["-m", "its_state", "x"],
        "script": [str(tmp_path / "its_state.py"), "--flag"],
    }[form]
    env = {
        "PATH": os.environ["PATH"],
        "LC_ALL": "C.UTF-8",
        "WORD": "säge",
        "TMPDIR": str(tmp_path),
        "TZ": "EST5",
        "PYTHONPATH": str(tmp_path / "other"),
    }
    if threads:
        env["OMP_NUM_THREADS"] = threads
    fresh = state(words, env, tmp_path)
    forked = state(words, {**env, ADDRESS: server.address}, tmp_path)
    assert forked["env"].pop(ADDRESS) == server.address  # type: ignore[attr-defined]
    assert forked == fresh


def test_signals_that_are_blocked_here_are_blocked_there(server: ForkServer, tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        blocked = state(["-c", STATE], {**os.environ, ADDRESS: server.address}, tmp_path)["blocked"]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert blocked == [signal.SIGUSR1]


def test_limits_umask_and_priority_are_those_of_this_process(server: ForkServer, tmp_path: Path) -> None:
    code = "import json, os, resource; print(json.dumps([os.umask(0), os.nice(1), {limits}]))".replace(
        "{limits}", "[resource.getrlimit(n) for n in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC)]"
    )
    core, mask = resource.getrlimit(resource.RLIMIT_CORE), os.umask(0o137)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    try:
        forked, fresh = (
            commands.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True).stdout
            for env in ({**os.environ, ADDRESS: server.address}, {**os.environ, ADDRESS: ""})
        )
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_CORE, core)
    assert json.loads(forked)[0] == 0o137
    assert forked == fresh


def test_the_signals_of_a_preempted_job_do_not_end_a_server(server: ForkServer, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(server.pid, number)
    env = {**os.environ, ADDRESS: server.address}
    code = "import os, signal; print(os.getppid(), flush=True); os.kill(os.getpid(), 15)"
    done = commands.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True)
    assert (done.stdout, done.returncode) == (f"{server.pid}\n", -signal.SIGTERM)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import os; os._exit(3)", 3),
        ("1 / 0", 1),
        ("import sys; sys.exit('words')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_the_end_of_a_fork_is_that_of_a_fresh_process(server: ForkServer, code: str, status: int) -> None:
    words = [sys.executable, "-c", code]
    forked = commands.run(words, env={**os.environ, ADDRESS: server.address}, capture_output=True)
    fresh = subprocess.run(words, capture_output=True, text=True)
    assert forked.returncode == fresh.returncode == status
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_random_numbers_that_nobody_seeded_differ(server: ForkServer) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    env = {**os.environ, ADDRESS: server.address}
    first, second = (
        commands.run([sys.executable, "-c", code], env=env, capture_output=True).stdout.split() for _ in "12"
    )
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_its_own_finalizers_run_at_its_end(server: ForkServer) -> None:
    code = "import sys, weakref; weakref.finalize(sys.modules['__main__'], print, 'finalized')"
    done = commands.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "finalized\n"


def test_input_output_and_errors_are_connected(server: ForkServer) -> None:
    code = "import sys; print(input()[::-1]); print('bad', file=sys.stderr)"
    env = {**os.environ, ADDRESS: server.address}
    done = commands.run([sys.executable, "-c", code], env=env, input="drawer", capture_output=True)
    assert (done.stdout, done.stderr) == ("reward\n", "bad\n")


WAITS = """
import os, sys
print("waits", flush=True)
with open("there", "w") as there:
    there.write("!")
os.read(int(os.open("never", os.O_RDWR)), 1)
"""
FAILS = """
import sys
open("there").read(1)
sys.exit("breaks")
"""


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("other", ["fails", "waits"])
def test_commands_that_do_not_all_end_well_are_killed_and_shown(
    server: ForkServer, fresh: bool, other: str, tmp_path: Path
) -> None:
    """As soon as one fails, or at the end of the time."""
    os.mkfifo(tmp_path / "there")
    os.mkfifo(tmp_path / "never")
    both = [
        commands.start(
            [sys.executable, "-c", code],
            env={**os.environ, ADDRESS: server.address},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            fresh=fresh,
        )
        for code in (WAITS, FAILS if other == "fails" else WAITS)
    ]
    if other == "waits":
        there = os.open(tmp_path / "there", os.O_RDWR)
        assert os.read(there, 1) + os.read(there, 1) == b"!!"
        os.close(there)
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as caught:
        commands.finish(both, timeout=600 if other == "fails" else 1.0)
    assert time.monotonic() - began < 300
    assert not any(psutil.pid_exists(process.pid) for process in both)
    text = str(caught.value)
    if other == "fails":
        assert "exit code -9\nwaits\n" in text
        assert "exit code 1\nbreaks\n" in text
    else:
        assert text.count("not ended within 1 s\nwaits\n") == 2


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
def test_a_forking_python_ends_as_its_fork_ends(
    server: ForkServer, forking_python: Path, end: str, status: int
) -> None:
    """What torchrun and shells start instead of Python."""
    env = {**os.environ, ADDRESS: server.address, "PYTHONUNBUFFERED": "1"}
    words = [forking_python, "-u", "-c", f"import os, sys; print(os.getppid()); {end}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (int(done.stdout), done.returncode) == (server.pid, status)


def test_a_forking_python_passes_signals_on(server: ForkServer, forking_python: Path) -> None:
    code = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print(1, flush=True)"
    env = {**os.environ, ADDRESS: server.address}
    words = [forking_python, "-c", f"{code}; signal.pause()"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 5


def test_a_forking_python_without_a_server_is_python(forking_python: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != ADDRESS}
    words = [forking_python, "-c", "import os; print(os.getppid())"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.getpid()


def test_a_pid_is_kept_until_it_is_given_up(server: ForkServer) -> None:
    process = ForkedProcess(server.address, ForkRequest(["-c", "pass"], dict(os.environ), []), [])
    assert process.wait_end() == 0
    assert process.wait_end() == 0
    zombie = psutil.Process(process.pid)
    assert zombie.status() == psutil.STATUS_ZOMBIE
    process.reap()
    gone, _ = psutil.wait_procs([zombie], timeout=10)
    assert gone == [zombie]


def test_a_process_whose_client_is_gone_is_reaped(server: ForkServer) -> None:
    read, write = os.pipe()
    request = ForkRequest(["-c", "import os; os.read(0, 1)"], dict(os.environ), [0])
    process = ForkedProcess(server.address, request, [read])
    child = psutil.Process(process.pid)
    process.reap()
    os.close(read)
    os.close(write)
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone == [child]


def test_further_modules_are_imported_once(server: ForkServer) -> None:
    code = "import os, sys; print('imaplib' in sys.modules, os.getppid())"
    env = {**os.environ, ADDRESS: server.address}
    words = [sys.executable, "-c", code]
    (first, branch), (second, again), (plain, parent) = (
        commands.run(words, env=env, capture_output=True, preload=preload).stdout.split()
        for preload in (["torch", "imaplib"], ["torch", "imaplib"], ["torch"])
    )
    assert (first, second, plain) == ("True", "True", "False")
    assert branch == again != parent == str(server.pid)


def test_what_cannot_be_imported_fails_where_it_is_needed(server: ForkServer) -> None:
    env = {**os.environ, ADDRESS: server.address}
    words = [sys.executable, "-c", "import no_such_module"]
    done = commands.run(words, env=env, capture_output=True, preload=["no_such_module"])
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_a_server_with_threads_refuses_and_the_process_is_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    os.environ["PYTHONPATH"] = str(tmp_path)
    env = dict(os.environ)
    with ForkServer(["threaded"]) as threaded:
        env[ADDRESS] = threaded.address
        with pytest.raises(ConnectionError, match="an import started 1 thread"):
            ForkedProcess(threaded.address, ForkRequest(["-c", "pass"], env, []), [])
        words = [sys.executable, "-c", "import os; print(os.getppid())"]
        process = child_process.start(words, env, piped=True)
        assert process.stdout is not None
        assert int(process.stdout.read()) == os.getpid()
        assert process.wait_end() == 0
        process.reap()


def test_a_server_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    env = {**os.environ, ADDRESS: str(tmp_path / "no socket")}
    process = child_process.start([sys.executable, "-c", "print('here')"], env, piped=True)
    assert process.stdout is not None
    assert process.stdout.read() == b"here\n"
    assert process.wait_end() == 0
    process.reap()


@pytest.mark.parametrize("forked", [True, False])
def test_an_end_is_detected_where_a_thousand_files_are_open(server: ForkServer, forked: bool) -> None:
    """select() takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2000)), hard))
    env = {**os.environ, ADDRESS: server.address if forked else ""}
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor in (null, *(os.dup(null) for _ in range(1100))):
            stack.callback(os.close, descriptor)
        process = child_process.start([sys.executable, "-c", "pass"], env)
        assert isinstance(process, ForkedProcess) == forked
        assert process.has_ended(60)
        assert process.wait_end() == 0
        process.reap()


def test_the_server_ends_with_its_owner() -> None:
    with ForkServer([]) as server:
        process = psutil.Process(server.pid)
        assert process.is_running()
    assert not psutil.pid_exists(server.pid)
