"""Deliberately broken forms of training on slices of sequences: each differs from the sound one by a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from distributed_backends.ddp.backend import DDPBackend
from distributed_kernels import attention_with_lse
from distributed_kernels.attention.transformers_attention import TransformersAttention
from torch import Tensor, nn

from distributed.interfaces.backend_spec import BackendSpec
from distributed.parallel.context_axis import ContextAxis
from distributed.parallel.mesh import Mesh
from distributed.registry.catalog import get_catalog

__all__ = ["MUTANTS", "spec_of"]


class _EdgeLost(ContextAxis):
    """Targets are shifted after the cut: the last position of a slice has none."""

    def cut(self, batch: Any) -> Any:
        *inputs, target = super().cut(batch)
        target = target.clone()
        target[:, -1] = -100
        return (*inputs, target)


class _Anew(ContextAxis):
    """Positions restart in each slice."""

    @contextmanager
    def over_slices(self, training: bool) -> Iterator[None]:
        def positions(attention: Any, length: int, device: torch.device) -> Tensor:
            return torch.arange(length, device=device)

        with patch.object(TransformersAttention, "positions", positions), super().over_slices(training):
            yield


class _Alone(ContextAxis):
    """The causal mask is that of a slice: a query sees none of the slices before."""

    @contextmanager
    def over_slices(self, training: bool) -> Iterator[None]:
        def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return attention_with_lse(q, k, v, causal=options["causal"], scale=options["scale"])[0]

        with patch.object(TransformersAttention, "attend", attend), super().over_slices(training):
            yield


class _SameMasks(ContextAxis):
    """All ranks draw the same masks of dropout for their slices."""

    @contextmanager
    def over_slices(self, training: bool) -> Iterator[None]:
        self._draws = False
        with super().over_slices(training):
            yield


class _LastForward(ContextAxis):
    """A layer that is computed again reads what the last forward pass of the rank has left."""

    def restore(self, state: Any) -> None:
        return None


class _Broken(DDPBackend):
    axis: type[ContextAxis]

    def _slices_of(self, model: nn.Module, mesh: Mesh) -> ContextAxis:
        found = super()._slices_of(model, mesh)
        found.__class__ = self.axis
        return found


class EdgeIsLost(_Broken):
    axis = _EdgeLost


class PositionsBeginAnew(_Broken):
    axis = _Anew


class MaskOfASlice(_Broken):
    axis = _Alone


class EdgeIsLostUnnoticed(EdgeIsLost):
    _compared = True


class PositionsBeginAnewUnnoticed(PositionsBeginAnew):
    _compared = True


class MaskOfASliceUnnoticed(MaskOfASlice):
    _compared = True


class PaddingOfTheLastForward(_Broken):
    axis = _LastForward


class SameMasks(_Broken):
    axis = _SameMasks


class GradientsAreAveraged(DDPBackend):
    """Gradients of slices are averaged, as those of replicas often are."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= 2


class OneSliceReports(DDPBackend):
    """What other ranks than the first see of a window's tokens is not reported."""

    @property
    def _reports(self) -> bool:
        return self.world.rank == 0


MUTANTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(EdgeIsLost, PositionsBeginAnew, MaskOfASlice),
        *(EdgeIsLostUnnoticed, PositionsBeginAnewUnnoticed, MaskOfASliceUnnoticed),
        *(GradientsAreAveraged, OneSliceReports, PaddingOfTheLastForward, SameMasks),
    )
}


def spec_of(name: str) -> BackendSpec:
    """The spec of a mutant, with all that its sound form claims."""
    base = get_catalog().backends["pytorch-ddp"]
    return replace(base, name=f"mutant-{name}", target=f"{__name__}:{name}")
