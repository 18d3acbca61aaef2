"""Compare, in the first step, what has to be equal on the ranks that share a model.

A model that draws its own random numbers, an augmentation that differs between ranks, or a parameter of which
a rank has only a part of the gradient would otherwise train something else without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded, local_part
from distributed.errors import UserError
from distributed.parallel.tensor_layers import TensorAxis

__all__ = ["EqualOnTensorRanks", "differ"]

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative difference that the order of additions explains, by dtype."""


class EqualOnTensorRanks:
    """Compares inputs and gradients over the ranks of the tensor axis, once.

    Args:
        axis: the ranks.
        module: the model.
        is_cut: whether a parameter is cut over the tensor axis.
    """

    def __init__(
        self, axis: TensorAxis, module: nn.Module, is_cut: Callable[[Tensor], bool] = is_sharded
    ) -> None:
        self._axis, self._module, self._is_cut = axis, module, is_cut

    @contextmanager
    def inputs(self) -> Iterator[None]:
        """Within the block, compare the input of each layer that is cut. Collective.

        Raises:
            UserError: a layer has different inputs.
        """
        self._axis.check = self._check_input
        try:
            yield
        finally:
            self._axis.check = None

    def _check_input(self, name: str, x: Tensor) -> None:
        if not self._are_equal(_marks([x]), x.dtype)[0]:
            raise UserError(
                f"the ranks that share the layer '{name}' have computed different inputs for it. The step was"
                " not taken",
                field="parallel.tensor",
                got=self._axis.size,
                allowed="models and data that are the same on the ranks that share a model",
                remedy="Draw random numbers from torch's global generator, and let no sample depend on the"
                " rank (data.per_sample_rng=true for augmentation)",
            )

    def check_gradients(self, partial: Sequence[nn.Parameter]) -> None:
        """Compare the gradients of the parameters that are not cut. Collective.

        Raises:
            UserError: a gradient differs.
        """
        skipped = {id(p) for p in partial}
        named = [
            (name, p)
            for name, p in self._module.named_parameters()
            if p.grad is not None and not self._is_cut(p) and id(p) not in skipped
        ]
        if not named:
            return
        coarsest = max((p.dtype for _, p in named), key=lambda dtype: _ROUNDING.get(dtype, 1e-2))
        equal = self._are_equal(_marks([local_part(p.grad) for _, p in named]), coarsest)
        wrong = [name for (name, _), same in zip(named, equal, strict=True) if not same]
        if wrong:
            raise UserError(
                f"the gradient of '{wrong[0]}' differs between the ranks that share the model: each has a"
                " part of it, and the plan does not name its module. The step was not taken",
                field="parallel.tensor_plan",
                got=f"{len(wrong)} parameters without a word",
                remedy="Add the module with replicated_with_grad_allreduce",
            )

    def _are_equal(self, own: Tensor, dtype: torch.dtype) -> list[bool]:
        # The minimum is the maximum of the negative values: one collective for both.
        extremes = torch.stack([own, -own])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._axis.group)
        most, least = extremes[0].tolist(), (-extremes[1]).tolist()
        room = _ROUNDING.get(dtype, 0.0)
        return [
            high[0] == low[0] or abs(high[0] - low[0]) <= room * low[1] + 1e-30
            for high, low in zip(most, least, strict=True)
        ]


def differ(tensors: Sequence[Tensor], group: Any) -> bool:
    """Whether the ranks of `group` have different values of `tensors`. Collective."""
    own = _marks(tensors)
    most = torch.stack([own, -own])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return not torch.equal(most[0], -most[1])


@torch.no_grad()
def _marks(tensors: Sequence[Tensor]) -> Tensor:
    """(sum with weights that depend on the place, sum of absolute values) of each tensor, in float64.

    All sums that are not finite are one value, as with gradients that overflow in fp16.
    """
    rows = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).double()
        weights = torch.arange(flat.numel(), device=flat.device) % 97 + 1
        rows.append(torch.stack([(flat * weights).sum(), flat.abs().sum() * 97]))
    marks = torch.stack(rows)
    return torch.where(marks.isfinite(), marks, torch.inf)
