"""Deliberately broken pipelines: each differs from the sound one by a line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed_backends.ddp.backend import DDPBackend
from torch import Tensor

from distributed.interfaces.backend import Window
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.task import Task
from distributed.parallel import pipeline_schedule
from distributed.parallel.pipeline import Pipeline
from distributed.registry.catalog import get_catalog

__all__ = ["spec_of"]


class TiedGradientsAreNotAdded(DDPBackend):
    """Each stage steps with its own gradient of a parameter that two of them hold."""

    def add_shared(self, pipeline: Pipeline) -> None:
        return None


class ReadsRowsOfThePadding(DDPBackend):
    """A stage reads the end of what it received, where a ragged micro-batch has no rows."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        sound = Pipeline._cut

        def cut(self: Pipeline, stage: int, received: Tensor | None, rows: int) -> Tensor | None:
            first = sound(self, stage, received, rows)
            return first if received is None or first is None else received[len(received) - len(first) :]

        Pipeline._cut = cut  # type: ignore[method-assign]
        try:
            return super().run_window(window)
        finally:
            Pipeline._cut = sound  # type: ignore[method-assign]


class FrozenBoundaryNeedsNoGradient(DDPBackend):
    """What a stage receives from frozen ones requires no gradient."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        sound = pipeline_schedule._meta
        pipeline_schedule._meta = lambda form, rows: sound(form, rows).requires_grad_(False)
        try:
            return super().run_window(window)
        finally:
            pipeline_schedule._meta = sound


class ReducesInBackward(DDPBackend):
    """Gradients are added by hooks in backward, as a wrapper around a stage would."""

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        self._added: dict[Tensor, Tensor] = {}
        for parameter in self.module.parameters():
            if not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Tensor) -> None:
        """Add the gradient of a micro-batch over the ranks, and keep the sum."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        dist.all_reduce(gradient, group=self.replica_group)
        self._added[parameter] = self._added[parameter] + gradient if parameter in self._added else gradient

    def reduce_gradients(self) -> None:
        for parameter, gradient in self._added.items():
            parameter.grad = gradient
        self._added.clear()


class CopiesCountTwice(DDPBackend):
    """The norm counts a parameter that two stages hold twice."""

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        square = torch.stack([g.double().square().sum() for g in self.gradients()]).sum()
        dist.all_reduce(square)
        return square.sqrt()


def spec_of(kind: type[Any]) -> BackendSpec:
    """The spec of a mutant, with all that its sound form claims."""
    base = get_catalog().backends["pytorch-ddp"]
    return replace(base, name=f"mutant-{kind.__name__}", target=f"{__name__}:{kind.__name__}")
