"""Ranks that are threads: checkpoints of many ranks without starting processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.collective_errors import Ranks
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import PortableReader, verify
from distributed.interfaces.placement import World
from distributed.interfaces.state import BackendState, Chunk

__all__ = [
    "COUNT",
    "Meeting",
    "SliceRank",
    "ThreadRank",
    "holds_step",
    "latest",
    "on_ranks",
    "save",
    "save_state",
    "tensor_of",
]

COUNT = 3000
"""Elements of the tensor that `save` writes: a shard spans more than one page."""


class Meeting:
    """Where the threads of one world hand values to each other, pickled as processes would.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[bytes] = [b""] * size


class ThreadRank(Ranks):
    """One rank, a thread.

    Args:
        rank: its number.
        meeting: of all ranks.
    """

    module: Any = None

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.world, self.meeting = World(rank=rank, size=len(meeting.slots)), meeting

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order."""
        self.meeting.slots[self.world.rank] = pickle.dumps(value)
        self.meeting.barrier.wait()
        values = [pickle.loads(slot) for slot in self.meeting.slots]
        self.meeting.barrier.wait()
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`."""
        return self.gather_objects(value)[root]

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """The sum of every rank's `values`, element by element."""
        return [sum(parts) for parts in zip(*self.gather_objects(list(values)), strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_objects(None)


class SliceRank(ThreadRank):
    """A rank that holds its slice of one tensor, whose content tells the step."""

    def __init__(self, rank: int, meeting: Meeting, step: int) -> None:
        super().__init__(rank, meeting)
        self.step = step

    def export_state(self) -> BackendState:
        """Its slice of `tensor_of(step)`, called ``w``."""
        rank, size = self.world.rank, self.world.size
        start, end = COUNT * rank // size, COUNT * (rank + 1) // size
        return BackendState([Chunk("w", "model", (COUNT,), start, tensor_of(self.step)[start:end].clone())])


def tensor_of(step: int) -> torch.Tensor:
    """What is saved at `step`: `COUNT` numbers."""
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(step))


def on_ranks(size: int, action: Callable[[int, Meeting], Any]) -> list[Any]:
    """What ``action(rank, meeting)`` returned or raised on each of `size` concurrent ranks."""
    outcomes: list[Any] = [None] * size
    meeting = Meeting(size)

    def work(rank: int) -> None:
        try:
            outcomes[rank] = action(rank, meeting)
        except Exception as error:  # noqa: BLE001 - the caller compares it
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def save(
    directory: object,
    step: int,
    size: int = 1,
    *,
    layers: dict[int, FileLayer] | None = None,
    kind: Callable[[int, Meeting, int], Any] = SliceRank,
    keep_last: int | None = None,
    keep_every: int | None = None,
    **extra: Any,
) -> list[Any]:
    """Save `tensor_of(step)` from `size` ranks; returns what each got or raised.

    Args:
        directory: a path or URL.
        step: of the checkpoint.
        size: number of ranks.
        layers: rank -> what writes; the others take what fits.
        kind: makes a rank.
        keep_last: as `PortableCheckpointer`.
        keep_every: as `PortableCheckpointer`.
        extra: joins what all ranks share.
    """

    def work(rank: int, meeting: Meeting) -> str:
        files = (layers or {}).get(rank)
        store = PortableCheckpointer(str(directory), keep_last=keep_last, keep_every=keep_every, files=files)
        return store.save(kind(rank, meeting, step), {"progress": {"step": step}, **extra}, {"rank": rank})

    return on_ranks(size, work)


def save_state(
    directory: object, size: int, export: Callable[[int, int], BackendState], step: int = 1
) -> str:
    """Save what ``export(rank, size)`` gives from `size` ranks; returns the path all of them got.

    Raises:
        RuntimeError: they got something else.
    """

    class Exporting(ThreadRank):
        def export_state(self) -> BackendState:
            return export(self.world.rank, self.world.size)

    outcomes = save(directory, step, size, kind=lambda rank, meeting, _: Exporting(rank, meeting))
    if len(set(outcomes)) > 1 or not isinstance(outcomes[0], str):
        raise RuntimeError(f"not saved: {outcomes}")
    return outcomes[0]


def latest(directory: object) -> str | None:
    """Path of the newest complete checkpoint."""
    return PortableCheckpointer(str(directory), keep_last=None).latest()


def holds_step(path: str | None, step: int) -> bool:
    """Whether `path` holds, whole and readable, what `save` saved at `step`."""
    return (
        path is not None
        and not verify(path)
        and torch.equal(PortableReader(path).read("model", "w"), tensor_of(step))
    )
