"""Compare the output of a model before and after it is cut.

A layer may compute something that depends on its whole width, or on the number of a head, which nothing in
its structure shows: it would train something else without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distributed.checkpoint.dtensor import whole
from distributed.errors import UserError
from distributed.parallel.sample_batch import undisturbed

__all__ = ["CutCheck", "room_for_rounding", "times_rounding"]

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Difference that the order of additions explains, relative to the largest output, by dtype of the weights.
Models of float64 weights may compute parts in float32."""
_HALF = 0.1
_REMEDY = (
    "Name the modules that can be cut in parallel.tensor_plan, such as those of the MLP, and leave the others"
    " whole"
)


class CutCheck:
    """The output of a whole model for two samples.

    Args:
        model: whole.
        forward: calls it.
    """

    def __init__(self, model: nn.Module, forward: Callable[[], Any]) -> None:
        self._model, self._forward = model, forward
        self._before = self._outputs()
        self._room = room_for_rounding(model)

    def compare(self, size: int, agree: Callable[[float], float]) -> None:
        """Compare the output of the cut model. Collective.

        Args:
            size: ranks of the tensor axis.
            agree: mean of a number over the ranks, so that all of them decide the same.

        Raises:
            UserError: it differs, or cannot be computed.
        """
        try:
            after = self._outputs()
        except Exception as error:
            raise UserError(
                f"the model cannot be computed when {size} ranks cut it: {type(error).__name__}: {error}",
                field="parallel.tensor",
                got=size,
                allowed="models that take the number of heads or features from their inputs (-1), not from"
                " their sizes",
                remedy=_REMEDY,
            ) from error
        times = agree(times_rounding(self._before, after, self._room))
        if times > 1.0:
            raise UserError(
                f"the model computes something else when {size} ranks cut it: its output for the first"
                f" samples differs by {times:.0e} times what rounding explains",
                field="parallel.tensor",
                got=size,
                allowed="models of which every cut layer computes each part of its output from the same part"
                " of its weights",
                remedy=_REMEDY,
            )

    def _outputs(self) -> list[Tensor]:
        with undisturbed(self._model):
            leaves = tree_leaves(self._forward())
        tensors = [whole(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return [tensor.double() for tensor in tensors if tensor.is_floating_point()]


def room_for_rounding(model: nn.Module) -> float:
    """Relative difference that rounding explains in the output of `model`."""
    return max(_ROUNDING.get(p.dtype, _HALF) for p in model.parameters() if p.is_floating_point())


def times_rounding(before: Sequence[Tensor], after: Sequence[Tensor], room: float) -> float:
    """Largest difference of outputs, as a multiple of what rounding explains.

    Args:
        before, after: float64 tensors.
        room: `room_for_rounding`.
    """
    found = 0.0
    for first, second in zip(before, after, strict=True):
        if first.shape != second.shape:
            return float("inf")
        if not torch.equal(first.isfinite(), second.isfinite()):
            return float("inf")  # but the mean over no targets is not a number in either
        one, other = first[first.isfinite()], second[second.isfinite()]
        if one.numel():
            limit = room * max(float(one.abs().max()), 1e-6)
            found = max(found, float((one - other).abs().max()) / limit)
    return found
