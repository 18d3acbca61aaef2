"""Four gloo ranks that stay alive over the session, and the checks that run in them.

`Ranks.run` calls a function of `rank_checks` on every rank and returns the ranks' results. One process
group of four, and its two of two, serve all tests.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support import commands

SIZE = 4
START, ANSWER, GRACE = 120.0, 60.0, 5.0
"""Seconds that ranks may take to start, a check to answer, and ranks to end."""
ROOT = Path(__file__).parents[2]


class Ranks:
    """The parent's end. The ranks start with the first check, and anew after one that failed."""

    def __init__(self) -> None:
        self._connections: dict[int, Connection] = {}
        self._processes: list[Any] = []

    def _start(self) -> None:
        self._folder = TemporaryDirectory()
        address = str(Path(self._folder.name, "socket"))
        command = [sys.executable, "-m", "tests.kernels.gloo_ranks", address]
        with Listener(address, "AF_UNIX") as listener:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            self._processes = [
                commands.start([*command, str(rank)], cwd=ROOT, env=environment) for rank in range(SIZE)
            ]
            self._accept(listener)

    def _accept(self, listener: Listener) -> None:
        socket: Any = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(START)
        for _ in self._processes:
            connection = listener.accept()
            self._connections[connection.recv()] = connection

    def run(self, check: str, size: int = SIZE, /, **arguments: Any) -> list[Any]:
        """The results of ``rank_checks.check(group, **arguments)`` on ranks 0 to SIZE - 1, in that order.

        `group` is that of all ranks, or the rank's own group of `size`.
        """
        if not self._processes:
            self._start()
        try:
            return self._run(check, size, arguments)
        except BaseException:
            # Ranks that one has left wait for it in vain.
            self.close()
            raise

    def _run(self, name: str, size: int, arguments: dict[str, Any]) -> list[Any]:
        # Plain pickles: multiprocessing's own would hand over tensors as shared memory.
        for connection in self._connections.values():
            connection.send_bytes(pickle.dumps((name, size, arguments)))
        waiting = {connection: rank for rank, connection in self._connections.items()}
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), ANSWER)
            if not ready:
                raise TimeoutError(f"{name}: ranks {sorted(waiting.values())} gave no answer")
            for connection in ready:
                failure, results[waiting.pop(connection)] = pickle.loads(connection.recv_bytes())
                if failure is not None:
                    raise RuntimeError(f"{name} failed on a rank:\n{failure}")
        return [results[rank] for rank in range(SIZE)]

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections.values():
            connection.close()
        for process in self._processes:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._connections = [], {}


def serve(address: str, rank: int) -> None:
    """A rank: answer until the parent hangs up."""
    import torch
    import torch.distributed as dist

    from tests.kernels import rank_checks

    torch.set_num_threads(1)
    store = dist.FileStore(f"{address}.store", SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, SIZE, 2)]
    groups = {SIZE: dist.group.WORLD, 2: pairs[rank // 2]}
    with Client(address, "AF_UNIX") as connection:
        connection.send(rank)
        while True:
            try:
                name, size, arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                break
            try:
                answer = None, getattr(rank_checks, name)(groups[size], **arguments)
            except Exception:  # noqa: BLE001 - the parent raises it
                answer = traceback.format_exc(), None
            connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
