"""Collectives over the ranks of one axis that autograd differentiates.

`exchange_rows` is for experts. The others are for the tensor axis, where a tensor is either *whole*: equal on
all ranks, its gradient too; *partial*: the sum over the ranks is meant; or a *part* along one dimension. Each
states what it makes of what (Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022 for parts of the
sequence).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "exchange_rows",
    "from_parts",
    "from_partial",
    "part_of",
    "parts_from_partial",
    "to_parts",
    "use_in_parts",
]


_OPS: Any = torch.ops._c10d_functional


def use_in_parts(x: Tensor, group: Any) -> Tensor:
    """A whole tensor for computations that differ between ranks: its gradient is the sum of theirs."""
    return _apply(_Whole, x, group)


def from_partial(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a partial tensor, whole."""
    return _apply(_Sum, x, group)


def from_parts(x: Tensor, group: Any, dim: int) -> Tensor:
    """Parts along `dim` put together to a whole tensor, whose gradient is whole."""
    return _apply(_Together, x, group, dim, False)


def part_of(x: Tensor, group: Any, dim: int) -> Tensor:
    """This rank's part along `dim` of a whole tensor."""
    return _apply(_Part, x, group, dim, False)


def to_parts(x: Tensor, group: Any, dim: int) -> Tensor:
    """Parts along `dim` put together for computations that differ between ranks: the gradient of a part is
    the sum of theirs."""
    return _apply(_Together, x, group, dim, True)


def parts_from_partial(x: Tensor, group: Any, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of a partial tensor."""
    return _apply(_Part, x, group, dim, True)


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Consecutive rows for each rank, `send` many, for theirs, `receive` many; each number may be 0. The
    gradient of a row returns to its sender."""
    return _apply(_Exchange, rows, send, receive, group)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _sum(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int, sums: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.sums = group, dim, sums
        return _gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        part = _scatter if ctx.sums else _own
        return part(grads[0], ctx.group, ctx.dim), None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int, sums: bool) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return (_scatter if sums else _own)(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gather(grads[0], ctx.group, ctx.dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


# torch's functional collectives, which torch.compile reads.


def _sum(x: Tensor, group: Any) -> Tensor:
    return _done(_OPS.all_reduce(x.detach().contiguous(), "sum", group.group_name))


def _gather(x: Tensor, group: Any, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    found = _done(_OPS.all_gather_into_tensor(x.detach().contiguous(), size, group.group_name))
    return found if dim == 0 else torch.cat(found.chunk(size), dim)


def _own(x: Tensor, group: Any, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _scatter(x: Tensor, group: Any, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    whole = x.detach() if dim == 0 else torch.cat(x.detach().chunk(size, dim))
    return _done(_OPS.reduce_scatter_tensor(whole.contiguous(), "sum", size, group.group_name))


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    return _done(_OPS.all_to_all_single(rows.detach().contiguous(), receive, send, group.group_name))


def _done(x: Tensor) -> Tensor:
    result: Tensor = _OPS.wait_tensor(x)
    return result
