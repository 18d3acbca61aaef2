"""Costs of a checkpoint of N ranks, each of which holds a piece of every tensor, as under FSDP."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import torch

from distributed.checkpoint.async_save import PendingSave
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.collective_errors import Ranks
from distributed.checkpoint.file_names import MANIFEST, MERGED
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import PortableReader, verify
from distributed.checkpoint.writer import write_rank
from distributed.interfaces.placement import World
from distributed.interfaces.state import BackendState, Chunk

__all__ = ["checkpoint_costs"]

Results = dict[str, float]
_TENSORS = tuple((key, f"layer.{n}") for n in range(2) for key in ("model", "optimizer.exp_avg"))


class CountedFiles(FileLayer):
    """A file layer that counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def read(self, path: str) -> bytes:
        self.reads += 1
        return super().read(path)


class _Peers(Ranks):
    """Rank 0 of N ranks, whose peers do as well as it does. Counts the bytes of collectives."""

    module: Any = None

    def __init__(self, size: int) -> None:
        self.world, self.bytes = World(size=size), 0

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        self.bytes += 8 * len(values)
        return [value * self.world.size for value in values]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self.bytes += 8
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        self.bytes += 8 * self.world.size
        return [value] * self.world.size

    def export_state(self) -> BackendState:
        return _state(0, self.world.size)


def _state(rank: int, size: int) -> BackendState:
    chunks = [
        Chunk(name, key, (2 * size,), 2 * rank, torch.full((2,), float(rank))) for key, name in _TENSORS
    ]
    return BackendState(chunks)


def _extra(rank: int) -> dict[str, Any]:
    return {"rank": rank, "records": {"sums": [0.0, 0.0], "steps": [[0.5, 1.0, 0.1]]}}


def checkpoint_costs(size: int, folder: str | None = None) -> Results:
    """Save from `size` ranks and open the checkpoint; counts, bytes and CPU seconds of rank 0.

    Args:
        folder: where to write; None takes memory, if there is such a file system.
    """
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=folder or memory) as name:
        return _save(size, name) | _resume(size, name)


def _save(size: int, folder: str) -> Results:
    files, peers = CountedFiles(), _Peers(size)
    store = PortableCheckpointer(folder, keep_last=None, files=files)
    began = process_time()
    pending = store.begin(peers, {"progress": {"step": 1}}, _extra(0))  # type: ignore[arg-type]
    if not isinstance(pending, PendingSave):
        raise TypeError(f"{pending} is there already")
    started = thread_time()
    for rank in range(1, size):
        write_rank(FileLayer(), pending.staging, rank, size, _state(rank, size), _extra(rank))
    of_peers = thread_time() - started
    store.finish(peers, pending)
    path = Path(store.path_of(1))
    return {
        "save gathers": peers.bytes,
        "index files": files.reads / 2,
        "manifest bytes": (path / MANIFEST).stat().st_size,
        "commit seconds": process_time() - began - of_peers,
        "write seconds": of_peers / size,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _resume(size: int, folder: str) -> Results:
    path = str(PortableCheckpointer(folder, keep_last=None).path_of(1))
    seconds = _timed(lambda: verify(path, 0, size))
    found: Results = {"verify seconds": seconds}
    started = process_time()
    reader = PortableReader(path)
    layer = reader._files = CountedFiles()
    tensor = reader.read("model", "layer.0")
    if not torch.equal(tensor, torch.arange(size, dtype=torch.float32).repeat_interleave(2)):
        raise ValueError("the checkpoint holds other values")
    size_of = Path(path, MERGED) if Path(path, MERGED).exists() else None
    num_bytes = (
        size_of.stat().st_size if size_of else sum(f.stat().st_size for f in Path(path).glob("rank_*"))
    )
    found |= {"index bytes": num_bytes, "index reads": layer.reads, "read seconds": process_time() - started}
    return found


def _timed(action: Callable[[], list[str]]) -> float:
    started = process_time()
    problems = action()
    if problems:
        raise ValueError(problems[0])
    return process_time() - started
