"""CustomCommunication: an all-reduce on a ring of ranks, under the name that hand-written loops use."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from distributed.communication.all_reduce_algorithms import ring_all_reduce
from distributed.errors import UserError

__all__ = ["CustomCommunication"]


class CustomCommunication:
    """An all-reduce on a ring for a training loop of your own, after `setup_distributed`.

    Args:
        world_size: number of ranks, to check it; None does not.
        rank: of this process, to check it; None does not.

    Raises:
        UserError: torch.distributed is not initialized, or `world_size` or `rank` is another.
    """

    def __init__(self, world_size: int | None = None, rank: int | None = None) -> None:
        if not dist.is_initialized():
            raise UserError(
                "torch.distributed is not initialized on this rank",
                field="CustomCommunication",
                remedy="Call setup_distributed() first",
            )
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        for name, given, own in (("world_size", world_size, self.world_size), ("rank", rank, self.rank)):
            if given not in (None, own):
                raise UserError(
                    f"the process group has another {name}",
                    field=name,
                    got=given,
                    allowed=str(own),
                    remedy="Leave world_size and rank out",
                )

    def ring_allreduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place, on a ring. Collective.

        Args:
            tensor: of equal shape and dtype on all ranks, of any length.

        Returns:
            `tensor`.
        """
        return ring_all_reduce(tensor)
