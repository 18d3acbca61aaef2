"""Deliberately broken all-reduces: each differs from the sound one in a line or two."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.all_reduce_algorithms.ring import ring
from distributed.communication.all_reduce_algorithms.tree import tree
from distributed.communication.collective_costs import chunk_bounds, core_size, tree_children

__all__ = ["MUTANTS"]


def stops_one_step_early(flat: Tensor, peers: Peers) -> None:
    """A ring that leaves out the last step of the all-gather."""
    rank, size = peers.rank, peers.size
    chunks = [flat[start:end] for start, end in chunk_bounds(flat.numel(), size)]
    kept = chunks[(rank + 2) % size].clone()  # what the last step brings
    ring(flat, peers)
    chunks[(rank + 2) % size].copy_(kept)


def adds_in_the_order_of_ranks(flat: Tensor, peers: Peers) -> None:
    """The right sum, but every element as x[0] + x[1] + ..., whatever the algorithm promises."""
    parts = [torch.empty_like(flat) for _ in range(peers.size)]
    dist.all_gather(parts, flat, group=peers._group)
    flat.copy_(parts[0])
    for part in parts[1:]:
        flat += part


def sends_whole_tensors(flat: Tensor, peers: Peers) -> None:
    """A ring on which the whole tensor goes around: the right sum, n times the bytes."""
    sent, received = flat.clone(), torch.empty_like(flat)
    for _ in range(peers.size - 1):
        peers.exchange(sent, (peers.rank + 1) % peers.size, received, (peers.rank - 1) % peers.size)
        flat += received
        sent.copy_(received)


def leaves_out_the_second_child(flat: Tensor, peers: Peers) -> None:
    """A tree that receives from both children, and adds the first."""
    children = tree_children(peers.rank, peers.size)
    if len(children) < 2:
        tree(flat, peers)
        return
    first, second = torch.empty_like(flat), torch.empty_like(flat)
    peers.receive(first, children[0])
    peers.receive(second, children[1])
    flat += first
    if peers.rank:
        peers.send((flat, (peers.rank - 1) // 2))
        peers.receive(flat, (peers.rank - 1) // 2)
    peers.send(*((flat, child) for child in children))


def leaves_out_the_folded_ranks(flat: Tensor, peers: Peers) -> None:
    """The ranks beyond the power of two get the sum of the others, and are not in it."""
    from distributed.communication.all_reduce_algorithms.halving_doubling import halving_doubling

    if peers.rank >= core_size(peers.size):
        flat.zero_()
    halving_doubling(flat, peers)


MUTANTS: dict[Callable[[Tensor, Peers], None], tuple[str, str]] = {
    stops_one_step_early: ("ring", "sum"),
    adds_in_the_order_of_ranks: ("ring", "order"),
    sends_whole_tensors: ("ring", "bytes"),
    leaves_out_the_second_child: ("tree", "sum"),
    leaves_out_the_folded_ranks: ("halving-doubling", "sum"),
}
"""Broken form -> (algorithm whose place it takes, the check that has to turn red)."""
