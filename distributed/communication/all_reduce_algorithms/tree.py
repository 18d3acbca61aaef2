"""All-reduce on a binary tree: sums go up to rank 0, and the result comes down."""

from __future__ import annotations

import torch
from torch import Tensor

from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.collective_costs import tree_children

__all__ = ["tree"]


def tree(flat: Tensor, peers: Peers) -> None:
    """Replace `flat` by its sum over the ranks.

    Rank r has the children 2 r + 1 and 2 r + 2. Each rank adds the sums of its children to its own values
    and sends the result to its parent (reduce); then the sum of rank 0 goes down (broadcast). The tensor is
    sent whole, without a pipeline of chunks.

    Order of additions: sum(r) = (x[r] + sum(2 r + 1)) + sum(2 r + 2), for every element.

    Args:
        flat: contiguous, of one dimension, of equal length on all ranks.
    """
    parent, children = (peers.rank - 1) // 2, tree_children(peers.rank, peers.size)

    received = torch.empty_like(flat) if children else flat
    for child in children:
        peers.receive(received, child)
        flat += received
    if peers.rank > 0:
        peers.send((flat, parent))

    if peers.rank > 0:
        peers.receive(flat, parent)
    if children:
        peers.send(*((flat, child) for child in children))
