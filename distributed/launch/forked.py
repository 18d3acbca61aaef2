"""What a client requests of a fork server, and how a fork becomes that Python process."""

from __future__ import annotations

import fcntl
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from distributed.system.omp_threads import omp_threads

ADDRESS = "DISTRIBUTED_FORK_SERVER"
"""Environment variable: path of the socket of the server that starts this process's ranks."""

_FREE = 512
"""From this number on descriptors are kept while they are put in their places."""
_LIMITS = [name for name in vars(resource) if name.startswith("RLIMIT_")]


def namespaces() -> list[str]:
    """Identifiers of this process's network, mount and process namespaces."""
    return [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid")]


def search_path(entries: Sequence[str]) -> list[str]:
    """Entries of `sys.path` for another process: the working directory under its name."""
    return [entry or os.getcwd() for entry in entries]


def user() -> list[int]:
    """The effective user and group of this process, and its further groups."""
    return [os.geteuid(), os.getegid(), *sorted(os.getgroups())]


def _umask() -> int:
    """Without setting it for a moment, during which another thread could make a file."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    lines = (line.split() for line in status.splitlines() if line.startswith("Umask:"))
    return int(next(lines, ["", "022"])[1], 8)  # kernels before 4.7 do not give it


def _resource_limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS}


@dataclass
class ForkRequest:
    """What the new process is. The defaults are what it would inherit from this process.

    Attributes:
        argv: a Python command line without the interpreter: ``["-P", "-c", code, *args]``,
            ``["-m", module, *args]`` or ``[script, *args]``.
        env: the whole environment.
        fds: numbers that the descriptors sent along get in the new process, in their order.
        preload: modules, or functions ``module:function`` to call, needed before the fork.
        new_session: whether the process leads a session of its own.
        tied: whether the process is killed when the client goes away.
        cwd: working directory.
        blocked: numbers of the signals that are blocked at the start.
        cpus: numbers of the processors that it may use.
        limits: name of a resource limit -> (soft, hard).
        namespaces: of the client; a server in others refuses.
        user: of the client; a server of another one refuses.
        umask: permissions that new files do not get.
        niceness: of the client; a server that is nicer refuses.
        search_path: `sys.path` of the new process. If it is given, a server refuses where its imports could
            have had another result under it or under `env`. None: the caller answers for that.
    """

    argv: list[str]
    env: dict[str, str]
    fds: list[int]
    preload: list[str] = field(default_factory=list)
    new_session: bool = False
    tied: bool = False
    cwd: str = field(default_factory=os.getcwd)
    blocked: list[int] = field(default_factory=lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    cpus: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    limits: dict[str, tuple[int, int]] = field(default_factory=_resource_limits)
    namespaces: list[str] = field(default_factory=namespaces)
    user: list[int] = field(default_factory=user)
    umask: int = field(default_factory=_umask)
    niceness: int = field(default_factory=lambda: os.getpriority(os.PRIO_PROCESS, 0))
    search_path: list[str] | None = None


def run_forked(request: ForkRequest, fds: list[int], set_by_imports: Mapping[str, str]) -> int:
    """Run the command line of `request` in this process and return its exit code.

    Args:
        fds: the descriptors that were sent with the request.
        set_by_imports: environment variables that the server's imports have set, as they would here.

    Raises:
        SystemExit, BaseException: whatever the command line raises.
    """
    if request.new_session:
        os.setsid()
    _place_descriptors(fds, request.fds)
    os.chdir(request.cwd)
    os.umask(request.umask)
    os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    os.sched_setaffinity(0, request.cpus)
    for name, limits in request.limits.items():
        if resource.getrlimit(getattr(resource, name)) != tuple(limits):
            resource.setrlimit(getattr(resource, name), (limits[0], limits[1]))
    _take_environment({**set_by_imports, **request.env})
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    _run(request.argv)
    return 0


def _place_descriptors(fds: list[int], numbers: list[int]) -> None:
    """Give the received descriptors their numbers; 0, 1 and 2 are /dev/null unless given."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE) for fd in fds]
    for fd in fds:
        os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    for number in {0, 1, 2} - set(numbers):
        os.dup2(null, number)
    if null not in {*numbers, 0, 1, 2}:
        os.close(null)
    for fd, number in zip(kept, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _take_environment(env: dict[str, str]) -> None:
    """What an interpreter and its libraries read from the environment when they start."""
    servers, own = _search_path(os.environ), _search_path(env)
    sys.path[:] = [*own, *(entry for entry in sys.path if entry not in {*servers, *own})]
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    tempfile.tempdir = None  # the server's, if something has asked for it there
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty(), write_through=unbuffered)  # type: ignore[union-attr]
    torch = sys.modules.get("torch")
    if torch is not None:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(omp_threads(env, cores) or cores)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # as when it is imported; Python's own generator does so at every fork


def _search_path(env: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(argv: list[str]) -> None:
    """Run ``[-P] -c code``, ``[-P] -m module`` or ``script``, with the arguments behind it."""
    safe_path = argv[0] == "-P"
    what, *rest = argv[1:] if safe_path else argv
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if what == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        if not safe_path:
            sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif what == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        sys.modules.pop(module, None)  # runpy warns of a main module that is imported already
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *rest]
        sys.path.insert(0, os.path.dirname(os.path.realpath(what)))
        runpy.run_path(what, run_name="__main__")
