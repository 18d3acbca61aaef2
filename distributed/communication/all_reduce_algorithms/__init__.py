"""Three ways to add tensors over ranks, written on messages between two ranks.

They show how an all-reduce works, and give a fixed order of additions on any transport. The library's own
`torch.distributed.all_reduce` is faster: training uses that. `distributed.communication.collective_costs` has
their formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.communication.all_reduce_algorithms.halving_doubling import halving_doubling
from distributed.communication.all_reduce_algorithms.messages import Peers
from distributed.communication.all_reduce_algorithms.ring import ring
from distributed.communication.all_reduce_algorithms.tree import tree
from distributed.system.tensors import assign_values

__all__ = ["ALL_REDUCES", "halving_doubling_all_reduce", "ring_all_reduce", "tree_all_reduce"]

AllReduce = Callable[..., Tensor]


@torch.no_grad()
def _in_place(
    algorithm: Callable[[Tensor, Peers], None], tensor: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    peers = Peers(group)
    if peers.size == 1:
        return tensor
    whole = tensor.detach().contiguous()
    algorithm(whole.reshape(-1), peers)
    if whole.data_ptr() != tensor.data_ptr():
        assign_values(tensor, whole)
    return tensor


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum `tensor` over the ranks, in place, on a ring. Collective.

    A rank sends 2 (n - 1) / n of the tensor in 2 (n - 1) messages.

    Args:
        tensor: of equal shape and dtype on all ranks, with any strides.
        group: the ranks; None for all.

    Returns:
        `tensor`.
    """
    return _in_place(ring, tensor, group)


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum `tensor` over the ranks, in place, on a binary tree. Collective.

    A rank sends the tensor once to its parent and once to each of at most two children.

    Args:
        tensor: of equal shape and dtype on all ranks, with any strides.
        group: the ranks; None for all.

    Returns:
        `tensor`.
    """
    return _in_place(tree, tensor, group)


def halving_doubling_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum `tensor` over the ranks, in place, by recursive halving and doubling. Collective.

    With p ranks, a power of two, a rank sends 2 (p - 1) / p of the tensor in 2 log2(p) messages. Further
    ranks send the tensor once, and the ranks that add theirs send it once more.

    Args:
        tensor: of equal shape and dtype on all ranks, with any strides.
        group: the ranks; None for all.

    Returns:
        `tensor`.
    """
    return _in_place(halving_doubling, tensor, group)


ALL_REDUCES: dict[str, AllReduce] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
}
"""Name of the algorithm -> function."""
