"""All-reduce on a ring: each rank sends to the next one only, one chunk at a time."""

from __future__ import annotations

from torch import Tensor

from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.collective_costs import chunk_bounds

__all__ = ["ring"]


def ring(flat: Tensor, peers: Peers) -> None:
    """Replace `flat` by its sum over the ranks.

    The tensor has a chunk for each rank. In n - 1 steps each chunk goes once around the ring, and every rank
    adds its own values (reduce-scatter); then rank r has the sum of chunk r + 1. In n - 1 further steps the
    sums go around (all-gather).

    Order of additions: chunk c is x[c] + x[c + 1] + ... + x[c + n - 1], from left to right, modulo n. It
    depends on the chunk, so on the place of an element in the tensor.

    Args:
        flat: contiguous, of one dimension, of equal length on all ranks.
    """
    rank, size = peers.rank, peers.size
    chunks = [flat[start:end] for start, end in chunk_bounds(flat.numel(), size)]
    after, before = (rank + 1) % size, (rank - 1) % size
    room = flat.new_empty(max(len(chunk) for chunk in chunks))

    for step in range(size - 1):
        own = chunks[(rank - step - 1) % size]
        received = room[: len(own)]
        peers.exchange(chunks[(rank - step) % size], after, received, before)
        own += received

    for step in range(size - 1):
        peers.exchange(chunks[(rank + 1 - step) % size], after, chunks[(rank - step) % size], before)
