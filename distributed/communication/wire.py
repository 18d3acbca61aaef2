"""Wire: the three collectives by which ranks exchange tensors, and the same over a torch process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GroupWire", "Reply", "Wire"]

_MESSAGE, _TAG = 1 << 18, 7001
"""gloo sends two large messages between two ranks one after the other, and smaller ones in both directions at
once: half the time on a link of 100 Mbit."""

# torch 2.13 has renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Reply:
    """A collective that was started. Calling the object waits for it, and returns its result.

    Args:
        wait: waits for the collective, and returns its result.
        is_completed: returns, without waiting, whether the result is there; None if the wire cannot tell.
    """

    def __init__(self, wait: Callable[[], Tensor], is_completed: Callable[[], bool] | None = None) -> None:
        self._wait, self.is_completed = wait, is_completed

    def __call__(self) -> Tensor:
        return self._wait()


class Wire(Protocol):
    """Collectives between the ranks that exchange tensors. Each method starts one, and returns the `Reply`
    that waits for its result.

    Attributes:
        rank: index of this rank.
        size: number of ranks.
    """

    rank: int
    size: int

    def sum(self, values: Tensor) -> Reply:
        """Start to add up a 1-dimensional tensor, which may be overwritten."""

    def gather(self, payload: Tensor) -> Reply:
        """Start to give all ranks the uint8 `payload` of each, as (ranks, bytes)."""

    def scatter(self, parts: Tensor) -> Reply:
        """Start to give rank i row i of the uint8 `parts` of each rank, as (ranks, bytes)."""


class GroupWire:
    """A `Wire` over a process group.

    Args:
        group: None for all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, values: Tensor) -> Reply:
        return _reply(dist.all_reduce(values, group=self._group, async_op=True), values)

    def gather(self, payload: Tensor) -> Reply:
        found = payload.new_empty(self.size, len(payload))
        if payload.device.type == "cpu":
            return self._exchange([payload] * self.size, found)
        work = _all_gather(found.view(-1), payload, group=self._group, async_op=True)
        return _reply(work, found)

    def scatter(self, parts: Tensor) -> Reply:
        found = torch.empty_like(parts)
        if parts.device.type == "cpu":
            return self._exchange(parts.unbind(), found)
        return _reply(dist.all_to_all_single(found, parts, group=self._group, async_op=True), found)

    def _exchange(self, parts: Sequence[Tensor], found: Tensor) -> Reply:
        """Send part i to rank i, and receive in row i what it sends, in messages of `_MESSAGE` bytes."""
        found[self.rank] = parts[self.rank]
        works: list[Any] = []
        # Every rank begins with the rank after it, so that no rank is sent to by all at once.
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            for sent, received in zip(parts[to].split(_MESSAGE), found[source].split(_MESSAGE), strict=True):
                works.append(dist.isend(sent, group=self._group, tag=_TAG, group_dst=to))
                works.append(dist.irecv(received, group=self._group, tag=_TAG, group_src=source))

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return found

        return Reply(wait)


def _reply(work: Any, result: Tensor) -> Reply:
    def wait() -> Tensor:
        work.wait()
        return result

    # The host does not see how far a GPU is.
    return Reply(wait, None if result.is_cuda else work.is_completed)
