"""RankPool: ranks that stay alive between runs, so that many checks share one start.

The parent hands over folders; each rank does with a folder exactly what a fresh rank does
(`worker.run_folder`), except that torch's process group is there already. The ranks are a run
of their own under the backend's launcher, which runs `serve` in them.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from distributed.errors import WorkerError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.launch.rank_process import leave, run_folder, watch_parent
from distributed.registry.catalog import load_target
from distributed.resilience.failure_reports import GRACE, FailureReport, find_cause
from distributed.system.addresses import bind_path
from distributed.system.private_folders import PrivateFolder

__all__ = ["RankPool", "serve"]

_Key = tuple[str, str, int, int, str]

_SOCKET = "DISTRIBUTED_POOL_SOCKET"
_GROUP = "DISTRIBUTED_POOL_GROUP"
_POLL = 0.5
"""Seconds between looks at whether the launcher still runs, while ranks start."""
_IDLE = 300.0
"""Seconds without a run after which ranks are ended, because they hold memory."""
_END = 30.0
"""Seconds that the launcher may take to end its ranks."""
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class RankPool(Launcher):
    """A launcher whose ranks outlive a run. A failed run ends them, and the next starts afresh,
    unless every rank refused it with the same message, but for its own number: then all are in
    the same state.

    They are started by the launcher of the first plan's backend, and shared by the backends
    of its framework that name the same one.

    Args:
        timeout: maximum duration of a run in seconds.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self.timeout = timeout
        self._pools: dict[_Key, _Ranks] = {}

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        key = (plan.spec.launcher, _process_kind(plan), plan.world_size, plan.num_replicas, _group_kind(plan))
        self._end(idle for idle, ranks in self._pools.items() if idle != key and ranks.idle_seconds > _IDLE)
        ranks = self._pools.get(key)
        if ranks is not None and not ranks.is_alive:
            # What had forked them ended between two runs, such as the fork server of a pytest session.
            self._end([key])
            ranks = None
        if ranks is None:
            ranks = self._pools[key] = _Ranks(plan)
        try:
            ranks.run(command.folder, self.timeout)
        except BaseException:
            if not ranks.refused:
                self._end([key])
            raise

    def close(self) -> None:
        """End all ranks."""
        self._end(self._pools)

    def _end(self, keys: Iterable[_Key]) -> None:
        ended = [self._pools.pop(key) for key in list(keys)]
        for ranks in ended:
            ranks.dismiss()
        for ranks in ended:
            ranks.close()


class _Ranks:
    """The live ranks of one world size, each at the other end of a private socket.

    Ranks of torch that a local launcher started are stopped between runs: threads of Horovod poll a thousand
    times a second. Others have to answer: Ray Train polls its workers, and TensorFlow's coordination service
    ends a task without heartbeats.

    Attributes:
        refused: whether all ranks ended the last run with the same `UserError`, but for their own numbers.
    """

    refused = False

    def __init__(self, plan: RunPlan) -> None:
        self._stack = ExitStack()
        self._error: BaseException | None = None
        self._ended = time.monotonic()
        self._ranks: dict[Connection, int] = {}
        self._pids: list[int] = []
        self._stops = (plan.spec.framework, plan.spec.launcher) == ("torch", BackendSpec.launcher)
        home = Path(self._stack.enter_context(PrivateFolder("distributed-pool-")))
        (home / "sys_path.json").write_text(json.dumps(sys.path), encoding="utf-8")
        command = RankCommand(
            [sys.executable, "-m", "distributed.testing.rank_pool"],
            home,
            {_SOCKET: str(home / "socket"), _GROUP: _group_kind(plan)},
            "distributed.testing.rank_pool:serve",
        )
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        bind_path(listener, home / "socket")
        listener.listen(plan.world_size)
        listener.settimeout(_POLL)
        self._thread = threading.Thread(target=self._launch, args=(plan, command), daemon=True)
        self._thread.start()
        self._stack.callback(self._thread.join, _END)
        try:
            while len(self._ranks) < plan.world_size:
                self._accept(listener)
        except BaseException:
            self.close()
            raise

    def _launch(self, plan: RunPlan, command: RankCommand) -> None:
        try:
            load_target(plan.spec.launcher)().run(plan, command)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the ranks
            self._error = error

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = Connection(listener.accept()[0].detach())
        except TimeoutError:
            if not self._thread.is_alive():
                raise self._error or RuntimeError("the ranks of a pool ended before they began") from None
            return
        rank, pid = connection.recv()
        self._ranks[self._stack.enter_context(connection)] = rank
        self._pids.append(pid)

    @property
    def is_alive(self) -> bool:
        """Whether every rank is a process that can run."""
        return all(psutil.pid_exists(pid) and not _is_zombie(pid) for pid in self._pids)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last run ended."""
        return time.monotonic() - self._ended

    def run(self, folder: Path, timeout: float) -> None:
        self._signal(signal.SIGCONT)
        try:
            self._run(folder, timeout)
        finally:
            self._ended = time.monotonic()
            if self._stops:
                self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _run(self, folder: Path, timeout: float) -> None:
        for connection in self._ranks:
            connection.send(str(folder))
        waiting, deadline = dict(self._ranks), time.monotonic() + timeout
        failed: dict[int, FailureReport | None] = {}
        while waiting and not any(map(_explains, failed.values())):
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for ended in ready:
                assert isinstance(ended, Connection)
                rank = waiting.pop(ended)
                if not _succeeded(ended):
                    failed[rank] = FailureReport.read(folder, rank)
                    # It may have lost another rank, whose report has the cause.
                    deadline = min(deadline, time.monotonic() + GRACE)
        self.refused = len(failed) == len(self._ranks) and _is_one_refusal(list(failed.values()))
        if failed:
            raise self._cause(failed)
        if waiting:
            late = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise WorkerError(
                f"rank {late} did not end within {timeout:g} s",
                rank=min(waiting.values()),
                host="localhost",
                exc_type="Timeout",
            )

    def _cause(self, failed: dict[int, FailureReport | None]) -> BaseException:
        """The first rank's own failure; else the launcher's report about a rank that is gone."""
        reports = [report for report in failed.values() if report]
        first = find_cause(reports) if reports else None
        if first is None or (first.second_hand and None in failed.values()):
            self._thread.join(_END)
            if self._error is not None:
                return self._error
        assert first is not None
        return first.to_error(failed)

    def dismiss(self) -> None:
        """Send the ranks an end message: a process forked meanwhile may hold the sockets open."""
        self._signal(signal.SIGCONT)
        for connection in self._ranks:
            with suppress(OSError):
                connection.send(None)

    def close(self) -> None:
        """Wait for the launcher, which ends with its ranks."""
        self._stack.close()


def _process_kind(plan: RunPlan) -> str:
    """Key of the processes that a pool reuses: the framework, and where TensorFlow trains on the ranks of
    another backend that too, because it cannot have ranks of its own once it has started."""
    spec = plan.spec
    return f"{spec.framework} on {spec.name}" if spec.target == spec.over_collectives else spec.framework


def _group_kind(plan: RunPlan) -> str:
    """The group that the ranks of a pool share, as torch names it: as a run of `plan` would open it, and gloo
    where the backend has a transport of its own."""
    return "cpu:gloo,cuda:nccl" if plan.communication_backend == "nccl" else "gloo"


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _succeeded(connection: Connection) -> bool:
    try:
        return bool(connection.recv() == 0)
    except (EOFError, ConnectionError):
        return False


def _explains(report: FailureReport | None) -> bool:
    """Whether the report is final: what one rank refuses, the others may be about to refuse, too."""
    return report is not None and not report.second_hand and report.user_error is None


def _is_one_refusal(reports: list[FailureReport | None]) -> bool:
    refusals = [report and _without_rank(report) for report in reports]
    return refusals[0] is not None and all(refusal == refusals[0] for refusal in refusals)


def _without_rank(report: FailureReport) -> dict[str, Any] | None:
    """What a rank refused, as any rank would have written it."""
    if report.user_error is None:
        return None
    own = f"rank {report.rank}:"
    return {**report.user_error, "message": str(report.user_error["message"]).replace(own, "rank:")}


def serve(home: Path) -> int:
    """Run as a rank of a pool: receive folders until the pool ends, then exit at once.

    Args:
        home: folder of the pool; not used.
    """
    if sys.platform == "linux":
        # A rank that is stopped would not see that the parent is gone.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Runs share the group: taking one down is slow, and right after a collective unsafe.
    dist.init_process_group(os.environ[_GROUP])
    folders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    with Client(os.environ[_SOCKET], "AF_UNIX") as connection:
        connection.send((int(os.environ["RANK"]), os.getpid()))
        threading.Thread(target=_listen, args=(connection, folders, busy), daemon=True).start()
        while (folder := folders.get()) is not None:
            status = run_folder(Path(folder))
            busy.clear()
            connection.send(status)
    return 0


def _listen(connection: Connection, folders: queue.SimpleQueue[str | None], busy: threading.Event) -> None:
    while (folder := _next_folder(connection)) is not None:
        busy.set()
        folders.put(folder)
    if busy.is_set():
        os._exit(1)  # it may wait in a collective for a rank that failed
    folders.put(None)


def _next_folder(connection: Connection) -> str | None:
    """None when the pool ends or is gone."""
    try:
        folder: str | None = connection.recv()
    except (EOFError, OSError):
        return None
    return folder


if __name__ == "__main__":
    watch_parent()
    from distributed.testing import rank_pool  # what a run pickles by name is then the same module

    leave(rank_pool.serve(Path(os.environ["DISTRIBUTED_RUN_DIR"])))
