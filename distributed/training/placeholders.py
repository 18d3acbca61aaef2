"""Micro-batches without samples, which a rank gets where a window has too few for all ranks.

They count for nothing, and leave no trace: in buffers, random numbers, or the batches of other steps.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.data.copies import copied
from distributed.interfaces.backend import MicroBatch, Window
from distributed.training.batch_transfer import tensors_of
from distributed.training.forward_state import Buffers

__all__ = ["Untouched", "stand_in", "with_stand_ins", "without_gradient"]


class Untouched(Buffers):
    """The buffers of a model and the random number generators at one moment.

    Args:
        model: whose buffers are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._generators = capture_rng()

    def restore(self) -> None:
        super().restore()
        restore_rng(self._generators)


class _NoGradient(torch.autograd.Function):
    """Zero, whose derivatives are zeros, too, where factors of zero would leave NaN and infinity."""

    @staticmethod
    def forward(ctx: Any, sparse: tuple[bool, ...], *inputs: Tensor) -> Tensor:
        ctx.sparse = sparse
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros((), dtype=inputs[0].dtype.to_real())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *map(_zeros, ctx.saved_tensors, ctx.sparse)


def without_gradient(*inputs: Tensor, sparse: Collection[Tensor] = ()) -> Tensor:
    """Zero, whose derivatives with respect to `inputs` are zeros; sparse ones for those in `sparse`."""
    flags = tuple(tensor in sparse for tensor in inputs)
    loss: Tensor = _NoGradient.apply(flags, *inputs)  # type: ignore[no-untyped-call]
    return loss


def _zeros(tensor: Tensor, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(tensor)
    rows = torch.empty(1, 0, dtype=torch.int64, device=tensor.device)
    return torch.sparse_coo_tensor(rows, tensor.new_empty(0, *tensor.shape[1:]), tensor.shape)


def with_stand_ins(window: Window) -> Window:
    """`window` with batches of their own in the place of its placeholders."""
    if all(micro.num_samples for micro in window.micro_batches):
        return window
    micro_batches = [m if m.num_samples else MicroBatch(stand_in(m.batch), 0) for m in window.micro_batches]
    return Window(micro_batches, window.num_samples)


@torch.no_grad()
def stand_in(batch: Any) -> Any:
    """A copy of a batch, with zeros in the place of what is not finite."""
    batch, given = copied(batch), batch
    with suppress(TypeError):  # of an object whose tensors are not known
        for tensor in tensors_of(batch) if batch is not given else ():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                tensor.nan_to_num_(0.0, 0.0, 0.0)
    return batch
