"""ThreadWire: the collectives of gradient codecs between threads of one process, with the bytes counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from distributed.communication.wire import Reply

__all__ = ["ThreadWire", "run_ranks"]

_T = TypeVar("_T")

_HANGS = 60.0
"""Seconds after which ranks that wait in a collective are taken to hang."""


class ThreadWire:
    """A `distributed.communication.wire.Wire` between threads.

    Attributes:
        rank: index of this rank.
        size: number of ranks.
        sent: bytes that this rank would have sent: an all-reduce as a ring sends it, payloads in the other
            collectives once to each of the others.
    """

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier
        self.sent = 0.0

    def sum(self, values: Tensor) -> Reply:
        """Add up a tensor in the order of the ranks."""
        self.sent += 2 * (self.size - 1) / self.size * values.nbytes
        parts = self._exchange(values.clone())
        found = parts[0].clone()
        for part in parts[1:]:
            found += part
        return Reply(lambda: found)

    def gather(self, payload: Tensor) -> Reply:
        """All ranks' payloads, as (ranks, bytes)."""
        self.sent += (self.size - 1) * payload.nbytes
        found = torch.stack(self._exchange(payload))
        return Reply(lambda: found)

    def scatter(self, parts: Tensor) -> Reply:
        """This rank's row of each rank's `parts`, as (ranks, bytes)."""
        self.sent += (self.size - 1) * parts[0].nbytes
        found = torch.stack([of_rank[self.rank] for of_rank in self._exchange(parts)])
        return Reply(lambda: found)

    def _exchange(self, value: Tensor) -> list[Tensor]:
        self._slots[self.rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


def run_ranks(size: int, work: Callable[[ThreadWire], _T]) -> list[_T]:
    """What ``work(wire)`` returns on each of `size` ranks, each of them a thread.

    Raises:
        BaseException: that of the first rank that failed; the others are ended.
    """
    slots, barrier = [None] * size, threading.Barrier(size, timeout=_HANGS)
    found: dict[int, _T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadWire(rank, size, slots, barrier))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]
