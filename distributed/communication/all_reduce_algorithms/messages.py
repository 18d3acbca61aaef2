"""Messages between two ranks of a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["Peers"]


class Peers:
    """The ranks of a group, and messages to them. Empty tensors are neither sent nor received.

    Args:
        group: process group; None for all ranks.

    Attributes:
        rank: index of this rank in the group.
        size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def send(self, *messages: tuple[Tensor, int]) -> None:
        """Send each (tensor, rank), all at the same time, and wait until they can be overwritten."""
        self._run([self._operation(dist.isend, *message) for message in messages])

    def receive(self, into: Tensor, source: int) -> None:
        """Wait for a message of rank `source`."""
        self._run([self._operation(dist.irecv, into, source)])

    def exchange(self, sent: Tensor, destination: int, into: Tensor, source: int) -> None:
        """Send and receive at the same time, and wait for both."""
        self._run([self._operation(dist.isend, sent, destination), self._operation(dist.irecv, into, source)])

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer)

    def _run(self, operations: list[dist.P2POp]) -> None:
        filled = [operation for operation in operations if operation.tensor.numel()]
        for work in dist.batch_isend_irecv(filled) if filled else ():
            work.wait()
