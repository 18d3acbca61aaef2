"""Deliberately broken pipelines: each differs from the sound one by a line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed_backends.ddp.backend import DDPBackend
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.task import Task
from distributed.parallel import pipeline_schedule
from distributed.parallel.deferred_build import tensors_of
from distributed.parallel.pipeline import Pipeline
from distributed.registry.catalog import get_catalog
from distributed.training.optimizers import build_model

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


class Live(TorchDispatchMode):
    """Bytes of the storages that operations in the block make, at most at a time.

    Attributes:
        most: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, {}  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return found


class WeighsItsShare(DDPBackend):
    """Sound, and fails where a rank other than 0 allocates more than its stages hold and one tensor."""

    def read_stages(self, model: nn.Module) -> None:
        super().read_stages(model)
        assert self.pipeline is not None
        tensors = dict(tensors_of(model))
        has_values = self.world.rank > 0 and not all(tensor.is_meta for tensor in tensors.values())
        self.refuse("a rank other than 0 has values" if has_values else "")
        own = sum(t.nbytes for name, t in tensors.items() if self.pipeline.tensors.holds(name))
        limit = own + max(t.nbytes for t in tensors.values())
        deal_out = self.pipeline.tensors.deal_out

        def weighed(*args: Any) -> Any:
            with Live() as live:
                made = deal_out(*args)
            fits = own <= live.most <= limit or self.world.rank == 0
            self.refuse("" if fits else f"a rank allocates {live.most} bytes, and may {limit}")
            return made

        self.pipeline.tensors.deal_out = weighed  # type: ignore[method-assign]

    def refuse(self, found: str) -> None:
        """Raise on all ranks what one of them has found, so that their pool stays. Collective."""
        for text in filter(None, self.gather_objects(found)):
            raise UserError(text)


class BuildsOnEveryRank(WeighsItsShare):
    """Each rank builds the whole model of a factory, and drops the rest."""

    def build(self, model: Any) -> nn.Module:
        super().build(model)
        return build_model(model, self.config.seed)


class AllocatesAll(WeighsItsShare):
    """A rank receives all tensors, and drops those of other stages afterwards."""

    def read_stages(self, model: nn.Module) -> None:
        super().read_stages(model)
        assert self.pipeline is not None
        tensors = self.pipeline.tensors
        sound, held = tensors.deal_out, tensors.ranks_of
        tensors.drop = lambda model: None  # type: ignore[method-assign]

        def deal_out(*args: Any) -> Any:
            tensors.ranks_of = lambda name: (0, 1)  # type: ignore[method-assign]
            try:
                return sound(*args)
            finally:
                tensors.ranks_of = held  # type: ignore[method-assign]

        tensors.deal_out = deal_out  # type: ignore[method-assign]


class SharesNoBuffers(DDPBackend):
    """The buffers of ranks other than 0 have memory and no values."""

    def read_stages(self, model: nn.Module) -> None:
        super().read_stages(model)
        assert self.pipeline is not None
        deal_out = self.pipeline.tensors.deal_out

        def without_buffers(*args: Any) -> Any:
            made = deal_out(*args)
            for buffer in model.buffers() if self.world.rank else ():
                buffer.zero_()
            return made

        self.pipeline.tensors.deal_out = without_buffers  # type: ignore[method-assign]


MUTANTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(TiedGradientsAreNotAdded, ReadsRowsOfThePadding, FrozenBoundaryNeedsNoGradient, ReducesInBackward),
        *(CopiesCountTwice, BuildsOnEveryRank, AllocatesAll, SharesNoBuffers),
    )
}


def spec_of(kind: type[Any]) -> BackendSpec:
    """The spec of a mutant, with all that its sound form claims."""
    base = get_catalog().backends["pytorch-ddp"]
    return replace(base, name=f"mutant-{kind.__name__}", target=f"{__name__}:{kind.__name__}")
