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
from distributed.communication.torch_settings import without_tf32
from distributed.errors import UserError
from distributed.parallel.sample_batch import undisturbed

__all__ = ["CutCheck", "room_for_rounding", "times_rounding"]

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Difference that the order of additions explains, relative to the largest output, by dtype of the weights.
Models of float64 weights may compute parts in float32."""
_HALF = 0.1
_REMEDY = (
    "Name the modules that can be cut in parallel.tensor_plan, such as those of the MLP, or where stages"
    " begin in parallel.stages, and leave the others whole. A layer of experts can divide itself"
    " (docs/experts.md)"
)


class CutCheck:
    """The output of a whole model for two samples.

    Args:
        model: whole.
        forward: calls it.
        field: of the configuration that cuts it, for errors.
        before: the output, where another rank has computed it; None calls `forward`.

    Attributes:
        before: the output, as float64 tensors on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        field: str,
        before: list[Tensor] | None = None,
    ) -> None:
        self._model, self._forward, self._field = model, forward, field
        self.before = self._outputs(forward) if before is None else before
        self._room = room_for_rounding(model)

    def accepts(self, forward: Callable[[], Any]) -> bool:
        """Whether `forward` computes the same, up to what rounding explains."""
        try:
            return self._times(self._outputs(forward)) <= 1.0
        except Exception:  # noqa: BLE001 - a division with which the model fails is rejected
            return False

    def compare(
        self,
        size: int,
        agree: Callable[[float], float],
        sees_output: bool = True,
    ) -> None:
        """Compare the output of the cut model. Collective.

        Args:
            size: ranks that cut it.
            agree: one number for all ranks from that of each, 0 where the output is not seen, so that all of
                them decide the same.
            sees_output: whether this rank does.

        Raises:
            UserError: it differs, or cannot be computed.
        """
        try:
            after = self._outputs(self._forward)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the model cannot be computed when {size} ranks cut it: {type(error).__name__}: {error}",
                field=self._field,
                got=size,
                allowed="models that take the number of heads, features or experts from their inputs (-1) and"
                " weights, not from their sizes, and use the parameters of a module by calling it",
                remedy=_REMEDY,
            ) from error
        times = agree(self._times(after) if sees_output else 0.0)
        if times > 1.0:
            raise UserError(
                f"the model computes something else when {size} ranks cut it: its output for the first"
                f" samples differs by {times:.0e} times what rounding explains",
                field=self._field,
                got=size,
                allowed="models of which every cut layer computes each part of its output from the same part"
                " of its weights, and every stage from what the one before it returns",
                remedy=_REMEDY,
            )

    def _times(self, after: Sequence[Tensor]) -> float:
        return times_rounding(self.before, after, self._room)

    def _outputs(self, forward: Callable[[], Any]) -> list[Tensor]:
        with undisturbed(self._model), without_tf32():
            return _floats(forward())


def _floats(outputs: Any) -> list[Tensor]:
    tensors = [whole(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [tensor.double().cpu() for tensor in tensors if tensor.is_floating_point()]


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
    if len(before) != len(after):
        return float("inf")
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
