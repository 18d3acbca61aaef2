"""A layer's part of each parameter in its group, and one sum over the ranks.

The sharding of a layer is stored in its parameters, as DTensors (`tensor_parallel` makes them so).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_kernels.errors import KernelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_cut(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Their module takes a second to import, which most runs need not spend."""
    return hasattr(tensor, "placements")


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor; anything else as it is."""
    return parameter.to_local() if is_cut(parameter) else parameter


def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy `value`, whole on every rank, into `parameter`; of a DTensor rank 0's part of it."""
    if is_cut(parameter):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def exchange(h: Tensor, layer: Any) -> Tensor:
    """The inner activation of a layer cut over a group, (..., rank): summed over the ranks in the forward
    pass when the inputs are cut, in the backward pass when the outputs are. Without a group it is `h`.

    Raises:
        KernelError: the parameters are cut in another way.
    """
    out = layer.factor_out
    if not is_cut(out):
        return h
    cut_in, cut_out = layer.factor_in.placements, out.placements
    if len(cut_in) == len(cut_out) == 1:
        group = out.device_mesh.get_group()
        if cut_in[0].is_replicate() and cut_out[0].is_shard(0):
            return _apply(_SumBackward, h, group)
        if cut_in[0].is_shard(1) and cut_out[0].is_replicate():
            return _apply(_SumForward, h, group)
    raise KernelError(
        f"{type(layer).__name__}: unsupported sharding of its factors",
        got=(cut_in, cut_out),
        allowed="as SKColwiseParallel or SKRowwiseParallel cut them",
        remedy="Use one of these; under FSDP call the layer through its module, so that it is gathered",
    )


def _apply(function: Any, h: Tensor, group: Any) -> Tensor:
    result: Tensor = function.apply(h, group)
    return result


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, group: Any) -> Tensor:
        total = h.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
