"""Run Python commands as `subprocess` does, but as forks of the tests' fork server.

A fresh ``python -m distributed.cli`` spends seconds of processor time on importing torch; a fork none. A test
marked ``real_start`` gets ordinary processes, as does a command that is not this interpreter's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

import pytest

from distributed.launch.child_process import ForkedProcess
from distributed.launch.forked import ADDRESS, ForkRequest

__all__ = ["finish", "run", "start"]

Stream = int | IO[Any] | None


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: str | None = None,
    capture_output: bool = False,
    text: bool = True,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, in a session of its own; further options as of `start`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(command, text=text, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def start(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    text: bool = True,
    preload: Sequence[str] = (),
    fresh: bool = False,
) -> Any:
    """As `subprocess.Popen`, in a session of its own.

    Args:
        preload: modules that the fork server imports first, such as ``deepspeed``.
        fresh: start an ordinary process, whose ranks are ordinary ones, too.
    """
    words, whole = [os.fspath(word) for word in command], dict(os.environ if env is None else env)
    if fresh:
        whole.pop(ADDRESS, None)
    if ADDRESS in whole and words[0] == sys.executable:
        try:
            return _Fork(words, whole, str(cwd or os.getcwd()), (stdin, stdout, stderr), text, preload)
        except ConnectionError:
            pass
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    return subprocess.Popen(words, env=whole, cwd=cwd, **streams, text=text, start_new_session=True)


def finish(processes: Sequence[Any], timeout: float, code: int | None = 0) -> list[tuple[str, str]]:
    """Output and errors of `processes`, all of which have to end within `timeout` seconds.

    Where one fails, the others may wait for it: all are killed. The time of each ends by itself. The failure
    shows what each printed.

    Args:
        processes: from `start`, with pipes.
        code: exit code that each has to have; None for any.
    """
    accepted = (lambda end: end.code is not None) if code is None else (lambda end: end.code == code)
    with ThreadPoolExecutor(len(processes)) as pool:
        ends = [pool.submit(_end, process, timeout) for process in processes]
        for end in as_completed(ends):
            if not accepted(end.result()) and end.result().code is not None:
                for process in processes:
                    process.kill()
    found = [end.result() for end in ends]
    if not all(map(accepted, found)):
        pytest.fail("\n\n".join(end.describe(timeout) for end in found), pytrace=False)
    return [(end.output, end.errors) for end in found]


@dataclass(frozen=True)
class _End:
    """How a process has ended: its exit code, None if it had to be killed."""

    words: Sequence[str]
    code: int | None
    output: str
    errors: str

    def describe(self, timeout: float) -> str:
        how = f"exit code {self.code}" if self.code is not None else f"not ended within {timeout:g} s"
        return f"{' '.join(self.words)}: {how}\n{self.output}{self.errors}"


def _end(process: Any, timeout: float) -> _End:
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as late:
        process.kill()
        process.wait()
        return _End(process.args, None, _text(late.output), _text(late.stderr))
    return _End(process.args, process.returncode, output or "", errors or "")


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


class _Fork:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: list[str],
        env: dict[str, str],
        cwd: str,
        streams: Sequence[Stream],
        text: bool,
        preload: Sequence[str],
    ) -> None:
        self.args, self.returncode = words, None
        self._text, self._poll_lock = text, Lock()
        self._theirs: list[int] = []
        self._numbers: list[int] = []
        self.stdin, self.stdout, self.stderr = (
            self._open(n, stream, text) for n, stream in enumerate(streams)
        )
        request = ForkRequest(words[1:], env, [0, 1, 2], preload=list(preload), new_session=True, cwd=cwd)
        try:
            self._process = ForkedProcess(env[ADDRESS], request, self._numbers)
        finally:
            for descriptor in self._theirs:
                os.close(descriptor)
        self.pid = self._process.pid

    def _open(self, number: int, stream: Stream, text: bool) -> IO[Any] | None:
        """Note the descriptor that the process gets as `number`; our end of a pipe, if it is one."""
        if stream == subprocess.PIPE:
            read, write = os.pipe()
            theirs, ours, mode = (read, write, "w") if number == 0 else (write, read, "r")
            self._theirs.append(theirs)
            self._numbers.append(theirs)
            return os.fdopen(ours, mode) if text else os.fdopen(ours, mode + "b", buffering=-1)
        if stream == subprocess.DEVNULL:
            null = os.open(os.devnull, os.O_RDWR)
            self._theirs.append(null)
            self._numbers.append(null)
        elif stream == subprocess.STDOUT:
            self._numbers.append(self._numbers[1])
        else:
            given = number if stream is None else stream
            self._numbers.append(given if isinstance(given, int) else given.fileno())
        return None

    def __enter__(self) -> _Fork:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None and not stream.closed:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with self._poll_lock:
            if self.returncode is None and self._process.has_ended(0):
                self.returncode = self._process.wait_end()
                self._process.reap()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def _has_ended(self, timeout: float | None) -> bool:
        try:
            return self.returncode is not None or self._process.has_ended(timeout)
        except (OSError, ValueError):  # another thread has seen the end and closed the connection
            return self.poll() is not None

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Send `input`, read all output, and wait for the end.

        Raises:
            subprocess.TimeoutExpired: with what has been printed so far. Call it once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        found: dict[str, list[Any]] = {}
        threads = []
        for name in ("stdout", "stderr"):
            stream = getattr(self, name)
            if stream is not None:
                found[name] = []
                threads.append(Thread(target=_read, args=(stream, found[name]), daemon=True))
                threads[-1].start()
        if self.stdin is not None:
            if input is not None:
                self.stdin.write(input)
            self.stdin.close()
        for thread in threads:
            thread.join(_left(deadline))
        if any(thread.is_alive() for thread in threads) or not self._has_ended(_left(deadline)):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *self._printed(found))
        self.wait()
        return self._printed(found)

    def _printed(self, found: Mapping[str, list[Any]]) -> tuple[Any, Any]:
        """Output and errors so far, as text or bytes; None without a pipe."""
        empty: Any = "" if self._text else b""
        output, errors = (
            None if name not in found else empty.join(found[name]) for name in ("stdout", "stderr")
        )
        return output, errors

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _read(stream: IO[Any], lines: list[Any]) -> None:
    lines.extend(stream)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
