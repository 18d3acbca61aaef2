"""Start Python processes by forking one that has imported their frameworks already.

Importing torch takes over a second of processor time in each rank; DeepSpeed and TensorFlow take three. A
fork server imports them once, and each process that it starts is a fork, which takes milliseconds::

    with ForkServer(preload=["torch"]) as server:
        os.environ[ADDRESS] = server.address       # for this process and all that it starts
        trainer.fit(...)                           # the ranks are forks

`distributed.launch.child_process` asks the server at this address, and starts an ordinary process where
there is none or where the server refuses. A server has one thread, has joined no process group and has no
CUDA context, because a fork would inherit them broken. It refuses if an import broke that rule, or if a
process with the requested environment and `sys.path` could have imported something else.

A scheduler that preempts a job signals all of its processes. A server blocks the signals that ask a process
to end, so that its forks can save; it ends when its owner does.

Protocol, over a Unix socket of type SOCK_SEQPACKET: the client sends one JSON object (`ForkRequest`) with
the file descriptors that the process gets. The server answers ``{"pid": int}`` or ``{"refused": str}``,
and later ``{"status": int}``: the exit code, or minus the number of the signal. The pid is not used again
until the client shuts its side of the connection down; the server reaps the process and then closes its own.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from distributed.launch.forked import ADDRESS, ForkRequest, namespaces, run_forked, user
from distributed.launch.import_record import ImportRecord
from distributed.system.addresses import bind_path
from distributed.system.private_folders import PrivateFolder

__all__ = ["ForkServer", "status_of"]


_MAX_MESSAGE = 1 << 20
_MAX_FDS = 32
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


class ForkServer:
    """A process that forks others, for as long as this object is open. Requests wait until its imports
    are done.

    Args:
        preload: modules that the server imports, and functions ``module:function`` that it calls,
            before its first fork.
        env: the environment in which it imports them; None: this process's, with one thread for OpenMP.
        search_path: its `sys.path`; None: that of a new interpreter.

    Attributes:
        address: path of its socket.
        pid: process id of the server; its forks are its children.
    """

    def __init__(
        self,
        preload: Sequence[str] = ("torch",),
        env: Mapping[str, str] | None = None,
        search_path: Sequence[str] | None = None,
    ) -> None:
        self._folder = PrivateFolder("distributed-fork-")
        self.address = str(Path(self._folder.name, "socket"))
        own = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else dict(env)
        own.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # pyarrow would start one
        own.pop(ADDRESS, None)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            bind_path(listener, Path(self.address))
            listener.listen(64)
            path = json.dumps(None if search_path is None else list(search_path))
            number = str(listener.fileno())
            command = [sys.executable, "-c", _SERVE, number, self._folder.name, path, *preload]
            self._process = subprocess.Popen(
                command,
                env=own,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Processes that it has started run on."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


_SERVE = "import sys; from distributed.launch.fork_server import main; sys.exit(main(*sys.argv[1:]))"


def main(listener: str, folder: str, search_path: str, *preload: str) -> int:
    """The server's process, and each fork of it: returns that process's exit code.

    Args:
        listener: descriptor of the listening socket.
        folder: its folder, which the server removes if its owner has ended without doing so.
        search_path: JSON list of the entries of `sys.path`, or null.
        preload: as of `ForkServer`.
    """
    del sys.path[0]  # the working directory, because the server was started by -c
    if (given := json.loads(search_path)) is not None:
        sys.path[:] = given
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    record = ImportRecord()
    server = _Server(socket.socket(fileno=int(listener)), 0, record)
    server.preload(preload)
    while isinstance(role := server.serve(), _Branch):
        server = _Server(role.requests, role.requests.fileno(), record)
        server.preload(role.preload)
    if role is None:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    return run_forked(role.request, role.fds, record.set_by_imports)


@dataclass
class _Job:
    """What a forked process is to run, and the descriptors that it was sent."""

    request: ForkRequest
    fds: list[int]


@dataclass
class _Branch:
    """A fork of the server that imports further modules and then forks for requests that need them."""

    requests: socket.socket
    preload: tuple[str, ...]


@dataclass(frozen=True)
class _Refusal:
    """Why a process cannot be a fork, and whether a server with the same imports would refuse it, too."""

    reason: str
    permanent: bool = False


@dataclass
class _Child:
    """A process that was started. Its connection is None once the client has closed it."""

    connection: socket.socket | None
    tied: bool
    reported: bool = False


class _Server:
    """The loop of a server or of a branch.

    Args:
        requests: where requests arrive: a listening socket, or a branch's end of a pair of sockets.
        owner: the server ends when the other end of this descriptor is closed.
        record: of this process's imports.
    """

    def __init__(self, requests: socket.socket, owner: int, record: ImportRecord) -> None:
        self._requests, self._open, self._record = requests, True, record
        self._loaded: set[str] = set()
        self._branches: dict[tuple[str, ...], socket.socket] = {}
        self._children: dict[int, _Child] = {}
        self._wake, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._watch(self._wake, self._report_ends)
        self._watch(requests, self._accept)
        if owner != requests.fileno():
            self._watch(owner, self._end)

    def _watch(self, source: socket.socket | int, action: Callable[[], Any]) -> None:
        self._selector.register(source, selectors.EVENT_READ, action)

    def preload(self, names: Sequence[str]) -> None:
        """Import modules and call ``module:function``s. One that fails will fail again in the process that
        needs it, where the error can be seen."""
        with _silent(), self._record.recording():
            for name in names:
                module, _, function = name.partition(":")
                with suppress(Exception):
                    imported = import_module(module)
                    if function:
                        getattr(imported, function)()
                self._loaded.add(name)
        for finalizer in vars(weakref.finalize)["_registry"]:
            finalizer.atexit = False  # they unload libraries, which ends with the process anyway
        _end_threads_of_libraries()
        gc.collect()
        gc.freeze()  # a collection in a fork would otherwise write to, and so copy, every page

    def serve(self) -> _Job | _Branch | None:
        """Serve until the owner is gone. In a fork, return what the fork is."""
        while self._open:
            for key, _ in self._selector.select():
                role: _Job | _Branch | None = key.data()
                if role is not None:
                    return role
        return None

    def _end(self) -> None:
        self._open = False

    def _accept(self) -> _Job | _Branch | None:
        if self._requests.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection, _ = self._requests.accept()
            data, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, _MAX_FDS)
        else:
            data, fds, _, _ = socket.recv_fds(self._requests, _MAX_MESSAGE, _MAX_FDS + 1)
            if not data:
                self._end()
                return None
            connection = socket.socket(fileno=fds.pop(0))
        if not data:
            _close(connection)
            return None
        return self._answer(connection, data, fds)

    def _answer(self, connection: socket.socket, data: bytes, fds: list[int]) -> _Job | _Branch | None:
        """Fork for one request, let a branch fork for it, or refuse it."""
        request = ForkRequest(**json.loads(data))
        missing = tuple(n for n in request.preload if n not in self._loaded and n not in sys.modules)
        if missing:
            return self._forward(missing, connection, data, fds)
        refusal = self._refusal(request)
        pid = -1 if refusal else os.fork()
        if pid == 0:
            self._leave_to_parent(connection)
            return _Job(request, fds)
        _close(*fds)
        if refusal is None:
            self._children[pid] = _Child(connection, request.tied)
            self._watch(connection, partial(self._release, pid))
            _send(connection, {"pid": pid})
        else:
            _send(connection, {"refused": refusal.reason, "permanent": refusal.permanent})
            _close(connection)
        return None

    def _refusal(self, request: ForkRequest) -> _Refusal | None:
        """Why a fork of this process cannot be the process that was asked for; None if it can."""
        if len(threads := os.listdir("/proc/self/task")) > 1:
            modules = ", ".join(request.preload)
            return _Refusal(f"an import started {len(threads) - 1} threads: {modules}", permanent=True)
        if devices := _open_devices():
            return _Refusal(f"an import opened a GPU: {', '.join(devices)}", permanent=True)
        if request.namespaces != namespaces():
            return _Refusal("the client is in other namespaces")
        if request.user != user() or request.niceness < os.getpriority(os.PRIO_PROCESS, 0):
            return _Refusal("the client is another user or has a higher priority")
        if request.search_path is None:
            return None
        difference = self._record.difference(request.env, request.search_path)
        return _Refusal(difference) if difference else None

    def _forward(
        self, missing: tuple[str, ...], connection: socket.socket, data: bytes, fds: list[int]
    ) -> _Branch | None:
        """Let the branch that has imported `missing` answer; fork it first if there is none."""
        if missing not in self._branches:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                self._leave_to_parent(here, connection, *fds)
                return _Branch(there, missing)
            there.close()
            self._branches[missing] = here
        socket.send_fds(self._branches[missing], [data], [connection.fileno(), *fds])
        _close(connection, *fds)
        return None

    def _report_ends(self) -> None:
        """Send the status of each process that has ended; reap those whose client is gone."""
        self._wake.recv(4096)
        for pid, child in list(self._children.items()):
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None or child.reported:
                continue
            child.reported = True
            if child.connection is None:
                self._reap(pid)
            else:
                _send(child.connection, {"status": status_of(info)})

    def _release(self, pid: int) -> None:
        """The client has closed its end."""
        child = self._children[pid]
        assert child.connection is not None
        self._selector.unregister(child.connection)
        if child.reported:
            self._reap(pid)
        elif child.tied:
            os.kill(pid, signal.SIGKILL)
        child.connection.close()
        child.connection = None

    def _reap(self, pid: int) -> None:
        os.waitpid(pid, 0)
        del self._children[pid]

    def _leave_to_parent(self, *others: socket.socket | int) -> None:
        """Close, in a fork, what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        _close(self._requests, self._wake, self._signalled, *self._branches.values(), *others)
        _close(*(child.connection for child in self._children.values() if child.connection is not None))


def status_of(info: os.waitid_result) -> int:
    """The exit code, or minus the number of the signal."""
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _end_threads_of_libraries() -> None:
    """OpenBLAS ends its threads before each fork, and starts them when they are needed."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _open_devices() -> list[str]:
    """Files of GPUs that this process has open: its forks could not use these devices."""
    files = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sorted({file for file in files if file.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))})


@contextmanager
def _silent() -> Iterator[None]:
    """Without what libraries print while they are imported."""
    sys.stderr.flush()
    errors, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(errors, 2)
        _close(errors, null)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # the client is gone
        connection.send(json.dumps(answer).encode())


def _close(*sources: socket.socket | int) -> None:
    for source in sources:
        if isinstance(source, int):
            os.close(source)
        else:
            source.close()
