"""Deliberately broken forms of training on a mesh: each differs from the sound one by a line."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_backends.ddp.backend import DDPBackend
from distributed_backends.fsdp.backend import FSDPBackend
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded, local_part
from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.parallel import expert_exchange, gradient_reducer
from distributed.parallel.tensor_layers import TensorAxis
from distributed.registry.catalog import get_catalog

__all__ = ["MUTANTS", "spec_of"]


class CopiesCountTwice(DDPBackend):
    """The norm adds what several ranks hold several times."""

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        square = sum(
            (g.double().square().sum() for g in self.gradients()), torch.zeros((), dtype=torch.float64)
        )
        dist.all_reduce(square)
        return square.sqrt()


class TiesComeApart(DDPBackend):
    """An embedding and the layer that shares its weight each get a part of their own."""

    def cut(self, model: nn.Module) -> None:
        super().cut(model)
        seen: set[int] = set()
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in seen:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
                elif parameter is not None:
                    seen.add(id(parameter))


class OneRankDrifts(DDPBackend):
    """A parameter that every rank holds changes on one of them."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        result = super().optimizer_step(max_norm, want_norm)
        whole = next(p for p in self.module.parameters() if not is_sharded(p))
        if self.world.rank == 1:
            whole.data += 1e-3
        return result


class OnePartDrifts(DDPBackend):
    """One of two copies of a part of a parameter changes."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        result = super().optimizer_step(max_norm, want_norm)
        part: Any = next(p for p in self.module.parameters() if is_sharded(p))
        if self.world.rank == 3:
            part.data.to_local().add_(1e-3)
        return result


class SlicesAreNotAdded(DDPBackend):
    """Gradients of norms, of which each rank has those of its slice of the sequence, are not added."""

    def _sum_partial(self, axis: TensorAxis) -> None:
        self._first = None  # which would refuse it


class LayoutIsNotTheParameters(DDPBackend):
    """A gradient stays as torch's own layers leave it."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        gradient_reducer.align_gradient, kept = lambda parameter: None, gradient_reducer.align_gradient
        try:
            return super().run_window(window)
        finally:
            gradient_reducer.align_gradient = kept


class CountsTokensTwice(FSDPBackend):
    """Ranks that share a model each add their count of the same tokens."""

    count_group = None  # type: ignore[assignment]


class CopiesOfShardsAreNotAdded(FSDPBackend):
    """With a codec, the gradients of the copies of a shard are not added up."""

    def setup(self, plan: RunPlan) -> World:
        world = super().setup(plan)
        self._gradient_reduction.axes_after = ("context",)
        return world


class WholeParametersAreAveraged(FSDPBackend):
    """Gradients of parameters that are not sharded stay the mean over all ranks, slices of sequences and
    copies of shards included."""

    def place_parts(self, model: nn.Module) -> nn.Module:
        model = super().place_parts(model)
        assert self._sharded is not None
        self._sharded.average_replicated = partial(  # type: ignore[method-assign]
            _with_scale_1, self._sharded.average_replicated
        )
        return model


def _with_scale_1(average: Callable[[int], None], scale: int) -> None:
    average(1)


class ExpertsAreAveraged(DDPBackend):
    """Gradients of experts are divided by the ranks that divide the experts, as those of copies are."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        assert self.mesh is not None
        for parameter in self.module.parameters():
            if self.is_expert(parameter) and parameter.grad is not None:
                parameter.grad /= self.mesh.dims.expert


class ExpertCopiesCountTwice(DDPBackend):
    """The norm adds up the experts of all ranks, of which several hold the same."""

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        assert self.mesh is not None
        parts = [
            local_part(p.grad).square().sum() / (1 if self.is_expert(p) else self.mesh.copies(p)[1])
            for p in self._parameters
            if p.grad is not None
        ]
        square = torch.stack(parts).sum()
        dist.all_reduce(square)
        return square.sqrt()


class ExpertsOfSlicesAreNotAdded(DDPBackend):
    """A rank steps with the gradient of its experts from its slices of sequences alone."""

    def setup(self, plan: RunPlan) -> World:
        world = super().setup(plan)
        self.mesh: Any = copy(self.mesh)  # the next run has the same
        self.mesh.same_experts = None
        return world


class TokensAreDropped(DDPBackend):
    """A rank computes 4 of the tokens that arrive at most."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        compute, expert_exchange._compute = expert_exchange._compute, _four_at_most
        try:
            return super().run_window(window)
        finally:
            expert_exchange._compute = compute


def _four_at_most(compute: Any, rows: Tensor, expert: Tensor) -> Tensor:
    kept = (torch.arange(len(rows)) < 4).unsqueeze(1)
    out: Tensor = compute(rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))
    return out * kept


MUTANTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(CopiesCountTwice, TiesComeApart, OneRankDrifts, OnePartDrifts, SlicesAreNotAdded),
        *(LayoutIsNotTheParameters, CountsTokensTwice, CopiesOfShardsAreNotAdded, WholeParametersAreAveraged),
        *(ExpertsAreAveraged, ExpertCopiesCountTwice, ExpertsOfSlicesAreNotAdded, TokensAreDropped),
    )
}


def spec_of(name: str) -> BackendSpec:
    """The spec of a mutant, with all that its sound form claims."""
    kind = MUTANTS[name]
    base = get_catalog().backends["fsdp" if issubclass(kind, FSDPBackend) else "pytorch-ddp"]
    return replace(base, name=f"mutant-{name}", target=f"{__name__}:{name}", axis_sizes=None)
