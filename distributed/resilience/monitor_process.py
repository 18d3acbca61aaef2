"""The watch of ranks that somebody else started: a small process beside the first rank of each host.

A thread in a rank would not do: one that waits in the interpreter's C code cannot report, and one
that waits on the ranks' store aborts a process that leaves the interpreter.
"""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, TYPE_CHECKING, Any, cast

from distributed.errors import UserError, WorkerError
from distributed.resilience import stack_dumps
from distributed.resilience.failure_reports import GRACE, error_of, report_of, say
from distributed.resilience.host_heartbeat import HostWatch
from distributed.resilience.phase_journal import ENDED, RUNNING, Entry, Journal, follow, keep
from distributed.resilience.preemption import SIGNALS
from distributed.resilience.rank_monitor import WATCHED, Limits, Watch, write_report
from distributed.system import processes
from distributed.system.private_files import write_whole

if TYPE_CHECKING:
    from distributed.interfaces.backend import Backend
    from distributed.interfaces.plan import RunPlan

__all__ = ["Observed", "found_by_watcher", "watch_beside"]

_BOOT = (
    "import json, os, sys\n"
    "line = b''\n"
    "while not line.endswith(b'\\n'): line += os.read(0, 1) or sys.exit()\n"
    "order = json.loads(line)\n"
    "sys.path[:] = order['path']\n"
    "from distributed.resilience.monitor_process import watch_beside\n"
    "watch_beside(order)\n"
)
_VERDICT = "verdict.json"
"""What the watcher found, for ranks that only know that they lost another."""


class Observed:
    """One rank's part in being watched, from before `Backend.setup` to the end.

    Args:
        plan: the run's.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self._folder: Path | None = None
        self._journal: Journal | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._rank: int | None = None
        self._run = ""
        if plan.mode == "spawn" and os.environ.get(WATCHED) == "1":
            self._begin(Path(os.environ["DISTRIBUTED_RUN_DIR"]), int(os.environ["RANK"]))

    def joined(self, backend: Backend) -> None:
        """The ranks have met. Collective where nobody watches them yet."""
        world = backend.world
        if self._journal is None and world.size > 1 and self.plan.mode != "in-process":
            self._meet(backend)
        if self._journal is not None:
            follow(backend, self._journal)

    def _begin(self, folder: Path, rank: int) -> None:
        stack_dumps.answer(folder, rank)
        self._journal = keep(folder, rank)
        self._folder, self._rank = folder, rank

    def _meet(self, backend: Backend) -> None:
        """Agree on a folder with the ranks of this host, and have its first one start the watcher."""
        world = backend.world
        self._rank = world.rank
        nodes = _nodes(backend.gather_objects((world.node_rank, world.host)))
        node = next(number for number, ranks in enumerate(nodes) if world.rank in ranks)
        first = nodes[node][0]
        folders = backend.gather_objects(_folder() if world.rank == first else None)
        self._run = folders[0] or ""
        # Every journal is there when the watcher looks.
        pids = backend.gather_objects(os.getpid() if self._took_part(folders[first], world.rank) else None)
        if world.rank == first and self._journal is not None:
            here = {rank: pids[rank] for rank in nodes[node] if pids[rank] is not None}
            self._start(here, backend, node, len(nodes))

    def _took_part(self, folder: str | None, rank: int) -> bool:
        """Whether this rank is watched from `folder` now. To be watched is a help, no reason to fail."""
        try:
            if folder is not None:
                self._begin(Path(folder), rank)
        except OSError:
            pass  # one host's name and number, and yet another file system: containers, for one
        return self._journal is not None

    def _start(self, pids: Mapping[int, int], backend: Backend, node: int, num_nodes: int) -> None:
        hosts = None
        if num_nodes > 1 and self._run and getattr(backend, "store", None) is not None:
            from distributed.communication.rendezvous import meeting_place

            place, timeout = meeting_place(self.plan.joined), self.plan.config.host_timeout
            hosts = [place, node, sorted(pids), timeout, self._run]
        order = {
            "hosts": hosts,
            "path": [entry or os.getcwd() for entry in sys.path],
            "folder": str(self._folder),
            "own": "DISTRIBUTED_RUN_DIR" not in os.environ,
            "pids": dict(pids),
            "limits": {**asdict(Limits.of(self.plan)), "num_nodes": num_nodes},
        }
        # -P, as the ranks: a file in the working folder may be called like a module.
        command = [sys.executable, "-P", "-c", _BOOT]
        try:
            self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError:
            return  # no room for another process
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(json.dumps(order).encode() + b"\n")
        self._watcher.stdin.flush()

    def cause(self, error: BaseException) -> dict[str, Any] | None:
        """What the watcher of this host has found: `error` says only that another rank is lost. None
        when it knows no more yet."""
        if self._folder is None or self.plan.mode == "spawn":
            return None
        return found_by_watcher(self._folder)

    def tell(self, error: BaseException) -> None:
        """Say in one line which rank failed where: its own traceback names no rank."""
        if self._rank is None or self.plan.mode == "spawn" or isinstance(error, (UserError, WorkerError)):
            return
        told = error_of({**report_of(error, self._rank), "second_hand": False})
        write_report(self.plan.config.checkpoint_dir, str(told))
        say(told.args[0].partition("\n")[0])

    def end(self, status: int = ENDED) -> None:
        """The run is over, well or not."""
        if self._journal is not None:
            self._journal.end(status)
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None


def _nodes(places: Sequence[tuple[int, str]]) -> list[list[int]]:
    """The ranks of each host. A number alone does not say which: ``mpirun --map-by node`` and variables
    set by hand give several hosts the same.

    Args:
        places: rank -> what its launcher calls its node's number, and its host's name.
    """
    ranks: dict[tuple[int, str], list[int]] = {}
    for rank, (number, host) in enumerate(places):
        ranks.setdefault((number, host), []).append(rank)
    return [ranks[place] for place in sorted(ranks, key=lambda place: (place[0], ranks[place]))]


def _folder() -> str | None:
    """Where the ranks of this host keep their journals; None when there is no room for any."""
    try:
        return os.environ.get("DISTRIBUTED_RUN_DIR") or mkdtemp(prefix="distributed-watch-")
    except OSError:
        return None


def found_by_watcher(folder: Path) -> dict[str, Any] | None:
    """The report of the rank that a watcher with its journals in `folder` found to blame, if it did."""
    path = folder / _VERDICT
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


# -- in the watcher's own process ------------------------------------------------------


def watch_beside(order: Mapping[str, Any]) -> None:
    """Watch until standard input is closed or the ranks have ended.

    Args:
        order: ``folder`` with the ranks' journals, which is removed in the end if it is ``own``;
            ``pids``: rank -> process id; ``limits``.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to every process of a step
    sys.stderr = cast("IO[str]", _Stderr())
    folder = Path(order["folder"])
    pids = {int(rank): int(pid) for rank, pid in order["pids"].items()}
    try:
        hosts = _hosts(*order["hosts"]) if order["hosts"] else None
        watch = Watch(folder, Limits(**order["limits"]), hosts)
        try:
            _watch(watch, pids)
        finally:
            watch.close()
    finally:
        if order["own"]:
            shutil.rmtree(folder, ignore_errors=True)


class _Stderr(io.TextIOBase):
    """Standard error as far as anybody still reads it: whoever does may leave before the ranks."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        return len(text)


def _hosts(place: Sequence[Any], node: int, ranks: Sequence[int], timeout: float, run: str) -> HostWatch:
    return HostWatch((place[0], place[1]), node, tuple(ranks), timeout, run)


def _watch(watch: Watch, pids: dict[int, int]) -> None:
    while True:
        closed = bool(select.select([0], [], [], watch.period)[0])
        gone = [rank for rank, pid in pids.items() if not processes.look_at(pid).alive]
        lost = [rank for rank in gone if _status(watch, rank) == RUNNING]
        if lost:
            report = _report_gone(watch, lost[0], pids)
            _leave(watch.folder, report)
            print(error_of(report).args[0], file=sys.stderr, flush=True)
        if lost or closed or len(gone) == len(pids):
            return _linger(watch, pids, closed)
        try:
            watch.look(pids)
        except WorkerError as error:
            _leave(watch.folder, report_of(error, error.rank))
            # The others lose it, and find out here what of. Who waits for a lost host waits in vain.
            for rank in [error.rank] if error.rank in pids else pids:
                with suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
            # Last: nobody may read what is said, and a full pipe takes no more.
            print(error, file=sys.stderr, flush=True)
            return _linger(watch, pids, closed)


def _linger(watch: Watch, pids: Mapping[int, int], closed: bool) -> None:
    """Stay while ranks may want to read what was found."""
    deadline = time.monotonic() + 2 * GRACE
    while (
        not closed and time.monotonic() < deadline and any(processes.look_at(p).alive for p in pids.values())
    ):
        closed = bool(select.select([0], [], [], watch.period)[0])


def _status(watch: Watch, rank: int) -> int:
    entry = Entry.read(Journal.path(watch.folder, rank))
    return ENDED if entry is None else entry.status


def _report_gone(watch: Watch, rank: int, pids: Mapping[int, int]) -> dict[str, Any]:
    report = {
        "rank": rank,
        "host": watch.host,
        "pid": pids[rank],
        "time": time.time(),
        "exc_type": "SIGKILL",
        "what": "is gone: it was killed, or ended without a word",
        "second_hand": False,
    }
    return watch.explain(report, [rank], pids)


def _leave(folder: Path, report: Mapping[str, Any]) -> None:
    write_whole(folder / _VERDICT, json.dumps(report).encode(), 0o666)
