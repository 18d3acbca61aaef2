"""Monitor for ranks that another launcher started: a small process beside the first rank of each host.

A thread in a rank cannot do this. It could not report while the rank is blocked in C code, and a thread
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from distributed.errors import UserError, WorkerError
from distributed.resilience import flight_dumps, stack_dumps
from distributed.resilience.failure_reports import GRACE, FailureReport
from distributed.resilience.host_heartbeat import HostHeartbeat
from distributed.resilience.phase_journal import ENDED, RUNNING, Entry, Journal, instrument, open_journal
from distributed.resilience.preemption import SIGNALS
from distributed.resilience.rank_monitor import WATCHED, Limits, RankMonitor, write_report
from distributed.system import processes
from distributed.system.output import print_line
from distributed.system.private_folders import add_owner, owned_folder, start_sweep

if TYPE_CHECKING:
    from distributed.interfaces.backend import Backend
    from distributed.interfaces.plan import RunPlan

_BOOT = (
    "import json, os, sys\n"
    "line = b''\n"
    "while not line.endswith(b'\\n'): line += os.read(0, 1) or sys.exit()\n"
    "order = json.loads(line)\n"
    "sys.path[:] = order['path']\n"
    "from distributed.resilience.monitor_process import run_monitor\n"
    "run_monitor(order)\n"
)


class MonitoredRank:
    """Monitoring in one rank, from before `Backend.setup` to the end of the run."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self._folder: Path | None = None
        self._journal: Journal | None = None
        self._monitor: subprocess.Popen[bytes] | None = None
        self._rank: int | None = None
        self._run = ""
        if plan.mode == "spawn" and os.environ.get(WATCHED) == "1":
            folder = Path(os.environ["DISTRIBUTED_RUN_DIR"])
            flight_dumps.switch_on(folder)
            self._begin(folder, int(os.environ["RANK"]))

    def joined(self, backend: Backend) -> None:
        """Start monitoring after the rendezvous. Collective unless the launcher monitors the ranks."""
        world = backend.world
        if self._journal is None and world.size > 1 and self.plan.mode != "in-process":
            self._meet(backend)
        if self._journal is not None:
            instrument(backend, self._journal)

    def _begin(self, folder: Path, rank: int) -> None:
        stack_dumps.enable_dumps(folder, rank)
        flight_dumps.answer_requests(folder, rank)
        self._journal = open_journal(folder, rank)
        self._folder, self._rank = folder, rank

    def _meet(self, backend: Backend) -> None:
        """Agree on a folder with the ranks of this host, and start the monitor in the first of them."""
        world = backend.world
        self._rank = world.rank
        nodes = _nodes(backend.gather_objects((world.node_rank, world.host)))
        node = next(number for number, ranks in enumerate(nodes) if world.rank in ranks)
        first = nodes[node][0]
        folders = backend.gather_objects(_folder() if world.rank == first else None)
        self._run = folders[0] or ""
        # Every journal exists when the monitor starts.
        pids = backend.gather_objects(
            os.getpid() if self._begin_journal(folders[first], world.rank) else None
        )
        if world.rank == 0 and flight_dumps.recorder_missed(world.device):
            print_line(
                "warning: torch's Flight Recorder is off (TORCH_FR_BUFFER_SIZE=0): the report of a hang will"
                " not name the ranks' last collectives"
            )
        if world.rank == first and self._journal is not None:
            here = {rank: pids[rank] for rank in nodes[node] if pids[rank] is not None}
            self._start(here, backend, node, len(nodes))

    def _begin_journal(self, folder: str | None, rank: int) -> bool:
        """Begin a journal in `folder`; whether that worked. A failure does not stop the run."""
        try:
            if folder is not None:
                self._begin(Path(folder), rank)
        except OSError:
            pass  # the same host name and number but another file system, as in containers
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
        # -P, as for the ranks: a file in the working folder may have the name of a module.
        command = [sys.executable, "-P", "-c", _BOOT]
        try:
            self._monitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError:
            return  # the process limit is reached
        assert self._monitor.stdin is not None
        self._monitor.stdin.write(json.dumps(order).encode() + b"\n")
        self._monitor.stdin.flush()

    def find_report(self) -> FailureReport | None:
        """The monitor's report of a lost rank; None if there is none yet."""
        if self._folder is None or self.plan.mode == "spawn":
            return None
        return FailureReport.read(self._folder)

    def tell(self, error: BaseException) -> None:
        """Print one line with the rank and its position, because its traceback names no rank."""
        if self._rank is None or self.plan.mode == "spawn" or isinstance(error, (UserError, WorkerError)):
            return
        named = replace(FailureReport.from_error(error, self._rank), second_hand=False).to_error()
        write_report(self.plan.config.checkpoint_dir, str(named))
        print_line(named.args[0].partition("\n")[0])

    def end(self, status: int = ENDED) -> None:
        """End the journal, the answers to the monitor's requests, and the monitor with the run."""
        flight_dumps.stop_answers()
        if self._journal is not None:
            self._journal.end(status)
        if self._monitor is not None and self._monitor.stdin is not None:
            self._monitor.stdin.close()
            self._monitor.wait()
            self._monitor = None


def _nodes(places: Sequence[tuple[int, str]]) -> list[list[int]]:
    """The ranks of each host. Node numbers alone are ambiguous: ``mpirun --map-by node`` and variables
    set by hand give several hosts the same one.

    Args:
        places: rank -> (node number from the launcher, host name).
    """
    ranks: dict[tuple[int, str], list[int]] = {}
    for rank, (number, host) in enumerate(places):
        ranks.setdefault((number, host), []).append(rank)
    return [ranks[place] for place in sorted(ranks, key=lambda place: (place[0], ranks[place]))]


def _folder() -> str | None:
    """The folder for the journals of this host's ranks; None if it cannot be created."""
    try:
        return os.environ.get("DISTRIBUTED_RUN_DIR") or owned_folder("distributed-watch-")
    except OSError:
        return None


# -- in the monitor's own process ------------------------------------------------------


_SWEEP_SECONDS = 5.0


def run_monitor(order: Mapping[str, Any]) -> None:
    """Monitor until standard input is closed or the ranks have ended.

    Args:
        order: ``folder`` of the ranks' journals, removed at the end if ``own`` is true;
            ``pids``: rank -> process id; ``limits``: fields of `Limits`.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to every process of a step
    sys.stderr = cast("IO[str]", _Stderr())
    folder, sweep = Path(order["folder"]), None
    if order["own"]:
        with suppress(OSError):
            add_owner(folder)  # the rank that made it may be the one that is lost
        sweep = start_sweep()
    pids = {int(rank): int(pid) for rank, pid in order["pids"].items()}
    try:
        hosts = _hosts(*order["hosts"]) if order["hosts"] else None
        watch = RankMonitor(folder, Limits(**order["limits"]), hosts)
        try:
            _monitor_ranks(watch, pids)
        finally:
            watch.close()
    finally:
        if order["own"]:
            shutil.rmtree(folder, ignore_errors=True)
        if sweep is not None:
            sweep.join(_SWEEP_SECONDS)  # a run may be shorter than the sweep


class _Stderr(io.TextIOBase):
    """Standard error without errors of a closed pipe: its reader may exit before the ranks."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        return len(text)


def _hosts(place: Sequence[Any], node: int, ranks: Sequence[int], timeout: float, run: str) -> HostHeartbeat:
    return HostHeartbeat((place[0], place[1]), node, tuple(ranks), timeout, run)


def _monitor_ranks(watch: RankMonitor, pids: dict[int, int]) -> None:
    while True:
        closed = bool(select.select([0], [], [], watch.period)[0])
        gone = [rank for rank, pid in pids.items() if not processes.process_info(pid).alive]
        lost = [rank for rank in gone if _status(watch, rank) == RUNNING]
        if lost:
            report = _report_gone(watch, lost[0], pids)
            report.write(watch.folder)
            print(report.to_error().args[0], file=sys.stderr, flush=True)
        if lost or closed or len(gone) == len(pids):
            return _wait_for_readers(watch, pids, closed)
        try:
            watch.look(pids)
        except WorkerError as error:
            FailureReport.from_error(error, error.rank).write(watch.folder)
            # Other ranks see a broken connection and read the cause from here. After the loss of a host,
            # kill all local ranks: they cannot finish.
            for rank in [error.rank] if error.rank in pids else pids:
                with suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
            # Last, because printing to a full pipe without a reader blocks.
            print(error, file=sys.stderr, flush=True)
            return _wait_for_readers(watch, pids, closed)


def _wait_for_readers(watch: RankMonitor, pids: Mapping[int, int], closed: bool) -> None:
    """Wait while ranks may still read the report."""
    deadline = time.monotonic() + 2 * GRACE
    while (
        not closed
        and time.monotonic() < deadline
        and any(processes.process_info(p).alive for p in pids.values())
    ):
        closed = bool(select.select([0], [], [], watch.period)[0])


def _status(watch: RankMonitor, rank: int) -> int:
    entry = Entry.read(Journal.path(watch.folder, rank))
    return ENDED if entry is None else entry.status


def _report_gone(watch: RankMonitor, rank: int, pids: Mapping[int, int]) -> FailureReport:
    what = "terminated without a report: it was killed, or called os._exit"
    return watch.explain(FailureReport(rank, "SIGKILL", what, pid=pids[rank]), [rank], pids)
