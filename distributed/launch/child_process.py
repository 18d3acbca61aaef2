"""Processes that this one starts: forks where a fork server runs, ordinary ones elsewhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from distributed.launch.fork_server import status_of
from distributed.launch.forked import ADDRESS, ForkRequest, search_path

if TYPE_CHECKING:  # at run time it would import the configuration, also where a process only asks for a fork
    from distributed.launch.warm_start import WarmServer


class ChildProcess(Protocol):
    """A process that was started. Its pid stays its own until `reap`.

    Attributes:
        pid: process id; also of its process group when it leads a session.
        stdout: read end of its output, None when the output was not asked for.
    """

    pid: int
    stdout: IO[bytes] | None

    def has_ended(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds, None without limit; whether it has ended."""

    def wait_end(self) -> int:
        """Block until it has ended, without giving its pid up: its exit code, or minus the signal."""

    def reap(self) -> None:
        """Give its pid up. It must have ended."""


class _FreshProcess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid, self.stdout = process.pid, process.stdout

    def has_ended(self, timeout: float | None) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(wait([descriptor], timeout))
        finally:
            os.close(descriptor)

    def wait_end(self) -> int:
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        return status_of(info)

    def reap(self) -> None:
        self._process.wait()


class Refused(ConnectionError):
    """A fork server does not fork a process; the message gives the reason.

    Attributes:
        permanent: whether a server with the same imports would refuse it, too.
    """

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class ForkedProcess:
    """A process that a fork server has started.

    Args:
        address: of the server.
        request: what the process is.
        descriptors: what it gets as `request.fds`.

    Raises:
        ConnectionError: the server has ended, or refuses.
    """

    def __init__(self, address: str, request: ForkRequest, descriptors: Sequence[int]) -> None:
        self.stdout: IO[bytes] | None = None
        self._status: int | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server.connect(address)
            socket.send_fds(self._server, [json.dumps(asdict(request)).encode()], list(descriptors))
            answer = self._receive()
        except OSError as error:
            self._server.close()
            raise ConnectionError(str(error)) from error
        if "pid" not in answer:
            self._server.close()
            reason = str(answer.get("refused", "the fork server has ended"))
            raise Refused(reason, bool(answer.get("permanent")))
        self.pid: int = int(answer["pid"])

    def _receive(self) -> dict[str, int | str]:
        data = self._server.recv(1 << 16)
        answer: dict[str, int | str] = json.loads(data) if data else {}
        return answer

    def has_ended(self, timeout: float | None) -> bool:
        """As `ChildProcess.has_ended`."""
        if self._status is not None:
            return True
        return bool(wait([self._server], timeout))

    def wait_end(self) -> int:
        """As `ChildProcess.wait_end`. A process whose server is gone counts as killed."""
        if self._status is None:
            self._status = int(self._receive().get("status", -9))
        return self._status

    def reap(self) -> None:
        """As `ChildProcess.reap`. One that still runs is left to its server."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)
            while self._server.recv(1 << 16):
                pass  # its status; the server closes the connection when the pid is free
        self._server.close()


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    piped: bool = False,
    pass_fds: Sequence[int] = (),
    preload: Sequence[str] = (),
    cwd: Path | None = None,
    output: IO[Any] | None = None,
    warm: WarmServer | None = None,
) -> ChildProcess:
    """Start `argv` as the leader of a session, with no input.

    Args:
        argv: a command line; only one of this interpreter can be forked.
        env: its whole environment. `ADDRESS` in it names the fork server, if there is one besides `warm`.
        piped: output and errors go to `ChildProcess.stdout`, else to `output`.
        pass_fds: descriptors that it gets under the same numbers.
        preload: modules that a fork server imports before it forks.
        cwd: its working directory, None for this process's.
        output: an open file; None for where this process's output and errors go.
        warm: a server of this process, which refuses what could differ from an ordinary process.
    """
    address = warm.address if warm is not None else env.get(ADDRESS)
    if address is not None and argv[0] == sys.executable:
        request = ForkRequest(
            list(argv[1:]), dict(env), [1, 2, *pass_fds], preload=list(preload), new_session=True
        )
        if cwd is not None:
            request.cwd = str(cwd)
        if warm is not None:
            request.search_path = search_path(sys.path)
        try:
            return _fork(request, address, piped, pass_fds, output)
        except ConnectionError as error:  # an ordinary process is slower and otherwise the same
            if warm is not None:
                warm.report_refusal(str(error), getattr(error, "permanent", False))
    return _FreshProcess(
        subprocess.Popen(
            argv,
            env=dict(env),
            pass_fds=list(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else output,
            stderr=subprocess.STDOUT if piped else output,
            start_new_session=True,
            cwd=cwd,
        )
    )


def _fork(
    request: ForkRequest, address: str, piped: bool, pass_fds: Sequence[int], output: IO[Any] | None
) -> ForkedProcess:
    read, write = os.pipe() if piped else (-1, -1)
    try:
        here = [1, 2] if output is None else [output.fileno()] * 2
        streams = [write, write] if piped else here
        process = ForkedProcess(address, request, [*streams, *pass_fds])
    except BaseException:
        if piped:
            os.close(read)
        raise
    finally:
        if piped:
            os.close(write)
    process.stdout = os.fdopen(read, "rb") if piped else None
    return process
