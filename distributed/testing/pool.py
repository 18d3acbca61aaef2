"""RankPool: ranks that stay alive between runs, so that many checks share one start.

The parent hands over folders; each rank does with a folder exactly what a fresh rank does
(`worker.run_folder`), except that torch's process group is there already. Run as
``python -m distributed.testing.pool`` it is such a rank.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch.distributed as dist

from distributed.errors import WorkerError
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.launch import Rendezvous, rank_envs
from distributed.supervisor import Supervisor
from distributed.worker import run_folder, watch_parent

if TYPE_CHECKING:
    from distributed.plan import RunPlan

__all__ = ["RankPool"]

_SOCKET = "DISTRIBUTED_POOL_SOCKET"


class RankPool(Launcher):
    """A launcher whose ranks outlive a run. A failed run ends them; the next starts afresh.

    Args:
        timeout: seconds a run may take before the ranks are given up.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._pools: dict[tuple[int, int], _Ranks] = {}

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        key = (plan.world_size, plan.num_replicas)
        ranks = self._pools.get(key)
        if ranks is None:
            ranks = self._pools[key] = _Ranks(plan)
        try:
            ranks.run(command.folder, self.timeout)
        except BaseException:
            self._pools.pop(key).close()
            raise

    def close(self) -> None:
        """End all ranks."""
        while self._pools:
            self._pools.popitem()[1].close()


class _Ranks:
    """The live ranks of one world size, each at the other end of a private socket."""

    def __init__(self, plan: RunPlan) -> None:
        self._stack = ExitStack()
        home = Path(self._stack.enter_context(TemporaryDirectory(prefix="distributed-pool-")))
        listener = self._stack.enter_context(Listener(str(home / "socket"), "AF_UNIX"))
        meeting = self._stack.enter_context(Rendezvous("127.0.0.1", 0, plan.world_size))
        command = RankCommand(
            [sys.executable, "-m", "distributed.testing.pool"], home, {_SOCKET: str(home / "socket")}
        )
        envs = rank_envs(plan, command, "127.0.0.1", meeting.port)
        self._supervisor = Supervisor(command.argv, envs, home)
        self._stack.callback(self._supervisor.stop)
        self._supervisor.start()
        self._ranks: dict[Connection, int] = {}
        for _ in envs:
            connection = self._stack.enter_context(listener.accept())
            self._ranks[connection] = connection.recv()

    def run(self, folder: Path, timeout: float) -> None:
        self._supervisor.folder = folder
        for connection in self._ranks:
            connection.send(str(folder))
        waiting, deadline = dict(self._ranks), time.monotonic() + timeout
        while waiting:
            ready = [
                c
                for c in wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if isinstance(c, Connection)
            ]
            if not ready:
                late = ", ".join(str(rank) for rank in sorted(waiting.values()))
                raise WorkerError(
                    f"rank {late} did not end within {timeout:g} s",
                    rank=min(waiting.values()),
                    host="localhost",
                    exc_type="Timeout",
                )
            failed = [waiting[c] for c in ready if not _succeeded(c)]
            if failed:
                self._supervisor.raise_reported(failed)
            for connection in ready:
                del waiting[connection]

    def close(self) -> None:
        self._stack.close()


def _succeeded(connection: Connection) -> bool:
    try:
        return bool(connection.recv() == 0)
    except EOFError:
        return False


def _serve() -> None:
    """Take folders until the parent goes."""
    watch_parent()
    # Runs share the group: taking one down is slow, and right after a collective unsafe.
    dist.init_process_group("gloo")
    with Client(os.environ[_SOCKET], "AF_UNIX") as connection:
        connection.send(int(os.environ["RANK"]))
        while True:
            try:
                folder = connection.recv()
            except EOFError:
                return
            connection.send(run_folder(Path(folder)))


if __name__ == "__main__":
    _serve()
