"""All-reduce by recursive halving and doubling: log2(n) exchanges down, and as many back."""

from __future__ import annotations

from torch import Tensor

from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.collective_costs import core_size

__all__ = ["halving_doubling"]


def halving_doubling(flat: Tensor, peers: Peers) -> None:
    """Replace `flat` by its sum over the ranks.

    p is the largest power of two that is not above the number of ranks. Ranks from p on first send all they
    have to rank r - p, which adds it, and get the result at the end (folding). Of the p ranks, each exchanges
    half of what it has with the rank at distance p / 2, then half of that at distance p / 4, and so on, and
    adds what it keeps (reduce-scatter by halving). The same exchanges backwards put the sums together
    (all-gather by doubling).

    Order of additions, for every element: the folded pairs x[r] + x[r + p] first; then pairs of such sums at
    distance p / 2, pairs of those at p / 4, down to 1.

    Args:
        flat: contiguous, of one dimension, of equal length on all ranks.
    """
    rank, core = peers.rank, core_size(peers.size)
    if rank >= core:
        peers.send((flat, rank - core))
        peers.receive(flat, rank - core)
        return
    room = flat.new_empty(flat.numel())
    folded = rank + core < peers.size
    if folded:
        peers.receive(room, rank + core)
        flat += room

    kept, levels, distance = flat, [], core // 2
    while distance:
        middle = len(kept) // 2
        below, above = kept[:middle], kept[middle:]
        kept, given = (above, below) if rank & distance else (below, above)
        received = room[: len(kept)]
        peers.exchange(given, rank ^ distance, received, rank ^ distance)
        kept += received
        levels.append((kept, given, rank ^ distance))
        distance //= 2

    for kept, given, peer in reversed(levels):
        peers.exchange(kept, peer, given, peer)
    if folded:
        peers.send((flat, rank + core))
