"""PowerSGD: two thin factors instead of a matrix.

Source: Vogels et al., PowerSGD, arXiv 1905.13727: one step of subspace iteration, which begins with the
factor of the step before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributed.communication.codecs.base import Codec, Message, Result, Rounds, Sum
from distributed.communication.codecs.sizes import factor_rank
from distributed.system.derived_seed import mix

__all__ = ["PowerSGDCodec", "orthonormal", "random_factor"]

_FACTOR = "factor"


class PowerSGDCodec(Codec):
    """P = M Q and Q = Mᵗ P, each added up over the ranks, with P made orthonormal between the two."""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        rank = factor_rank(tuple(values.shape), self.options.rank)
        if not rank:
            total = yield Sum(values)
            return Result(total, values)
        matrix = values.reshape(values.shape[0], -1)
        size, before = (matrix.shape[1], rank), message.state.get(_FACTOR)
        fresh = random_factor(size, message).to(matrix)
        factor = fresh if before is None or before.shape != size else before.to(matrix)
        # A gradient of zeros leaves a factor of zeros, with which nothing would ever be sent again.
        factor = torch.where((factor == 0).all(0), fresh, factor)
        left = orthonormal((yield Sum(matrix @ factor)))
        own = matrix.T @ left
        right = yield Sum(own)
        message.state[_FACTOR] = right
        return Result(*((left @ part.T).view(values.shape) for part in (right, own)))


def random_factor(size: tuple[int, int], message: Message) -> Tensor:
    """The factor of the first step, and the columns that take the place of zeros: the same on all ranks."""
    draw = torch.Generator().manual_seed(mix("powersgd", message.seed, message.name, message.step))
    return torch.randn(size, generator=draw, dtype=torch.float64)


def orthonormal(matrix: Tensor) -> Tensor:
    """The columns of `matrix` made orthonormal by modified Gram-Schmidt, with operations that give all ranks
    the same bits. A column without a part of its own becomes zero."""
    found = matrix.clone()
    tiny = 8 * torch.finfo(matrix.dtype).eps
    for column in range(matrix.shape[1]):
        own = found[:, column]
        before = own.norm()
        for other in range(column):
            own -= (found[:, other] @ own) * found[:, other]
        norm = own.norm()
        own.mul_(torch.where(norm <= tiny * before, torch.zeros_like(norm), 1 / norm))
    return found
