"""RankPool: ranks that stay alive between runs, so that many checks share one start.

The parent hands over folders; each rank does with a folder exactly what a fresh rank does
(`worker.run_folder`), process group included. Run as ``python -m distributed.testing.pool``
it is such a rank.
"""

from __future__ import annotations

import os
import queue
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distributed.errors import WorkerError
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.launch import Rendezvous, rank_envs
from distributed.supervisor import Supervisor
from distributed.worker import run_folder, watch_parent

if TYPE_CHECKING:
    from distributed.plan import RunPlan

__all__ = ["RankPool"]


class RankPool(Launcher):
    """A launcher whose ranks outlive a run. A failed run ends them; the next starts afresh.

    Args:
        timeout: seconds a run may take before the ranks are given up.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self.timeout = timeout
        self._pools: dict[int, _Ranks] = {}

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        ranks = self._pools.get(plan.world_size)
        if ranks is None:
            ranks = self._pools[plan.world_size] = _Ranks(plan)
        try:
            ranks.run(command.folder, self.timeout)
        except BaseException:
            self._pools.pop(plan.world_size).close()
            raise

    def close(self) -> None:
        """End all ranks."""
        while self._pools:
            self._pools.popitem()[1].close()


class _Ranks:
    """The live ranks of one world size."""

    def __init__(self, plan: RunPlan) -> None:
        self.size, self._number = plan.world_size, 0
        self._stack = ExitStack()
        home = Path(self._stack.enter_context(TemporaryDirectory(prefix="distributed-pool-")))
        meeting = self._stack.enter_context(Rendezvous("127.0.0.1", 0, self.size))
        self._store = meeting.store
        command = RankCommand([sys.executable, "-m", "distributed.testing.pool"], home)
        self._supervisor = Supervisor(command.argv, rank_envs(plan, command, "127.0.0.1", meeting.port), home)
        self._stack.callback(self._supervisor.stop)
        self._supervisor.start()

    def run(self, folder: Path, timeout: float) -> None:
        number, self._number = self._number, self._number + 1
        self._supervisor.folder = folder
        self._store.set(f"pool/job/{number}", str(folder))
        done = [f"pool/done/{number}/{rank}" for rank in range(self.size)]
        waited = 0.0
        while not self._store.check(done):
            if waited > timeout:
                raise WorkerError(f"the run did not end within {timeout:g} s", rank=-1, host="localhost",
                                  exc_type="Timeout")
            waited += 0.25
            self._wait_or_fail(done)
        failed = [rank for rank, key in enumerate(done) if self._store.get(key) != b"0"]
        if failed:
            self._supervisor.raise_reported(failed)

    def _wait_or_fail(self, keys: list[str]) -> None:
        import torch.distributed as dist

        try:
            self._store.wait(keys, timedelta(seconds=0.25))
        except dist.DistStoreError:
            failed = [r for r in range(self.size) if (self._supervisor.folder / f"error_{r}.json").exists()]
            if failed:
                self._supervisor.raise_reported(failed)
            try:
                entry = self._supervisor.ended.get_nowait()
            except queue.Empty:
                return
            self._supervisor.raise_reported([entry.rank])

    def close(self) -> None:
        self._stack.close()


def _serve() -> None:
    """Take folders until the parent goes."""
    import torch.distributed as dist

    watch_parent()
    rank = os.environ["RANK"]
    store: Any = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                               int(os.environ["WORLD_SIZE"]), is_master=False, wait_for_workers=False)
    number = 0
    while True:
        key = f"pool/job/{number}"
        store.wait([key], timedelta(days=1))
        # Keeps the rendezvous of one run apart from the next one's.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        status = run_folder(Path(store.get(key).decode()))
        store.set(f"pool/done/{number}/{rank}", str(status))
        number += 1


if __name__ == "__main__":
    _serve()
