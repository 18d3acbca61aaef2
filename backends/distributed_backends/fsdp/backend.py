"""FSDPBackend: shard parameters, gradients and optimizer state over the ranks (torch's fully_shard)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distributed.checkpoint.dtensor import local_part
from distributed.communication.wire import GroupWire
from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.parallel.gradient_reducer import GradientReducer, build_reducer
from distributed.parallel.mesh_backend import MeshBackend
from distributed.training.blocks import outermost
from distributed.training.gather_order import GatherOrder
from distributed.training.gradient_use import GradientUse
from distributed.training.mixins.accumulation import NO_CONTEXT
from distributed.training.model_traits import HOOKED, SPARSE, Trait, refuse, written_weights
from distributed.training.torch_backend import StepModule
from distributed_backends.fsdp.flat_steps import flatten_whole
from distributed_backends.fsdp.reduction import CodecReduction, Reduction
from distributed_backends.fsdp.section import FSDPSection
from distributed_backends.fsdp.sharded_model import ShardedModel
from distributed_backends.fsdp.units import find_units

if TYPE_CHECKING:
    from distributed.parallel.pipeline import Pipeline

__all__ = ["FSDPBackend"]


_CANNOT = {
    HOOKED: "FSDP2 would not call it, because it replaces parameters by shards",
    SPARSE: "FSDP2 shards dense gradients",
}


class FSDPBackend(MeshBackend):
    """torch's FSDP2 under the one loop. FSDP2 does not shard on a single rank: the
    whole model stays on its device.

    **Precision** is autocast over parameters in their own dtype, as under ``pytorch-ddp``, so
    that the same config is the same training. ``fsdp.reduce_dtype`` changes the dtype of the
    reduction, and ``fsdp.param_dtype`` that of gathered parameters, which rounds them for every
    operation.

    **Counts** (C2). Where the number of tokens of a global batch is known after forward only, the
    ranks add their counts in a separate small collective, which runs during the last backward. A
    parameter that carries the count, as under DDP, cannot be sharded.

    **BatchNorm** as under DDP: statistics per rank while training, rank 0's for validation.

    **Experts** that ranks divide are not sharded further. Their gradients are reduced after backward.
    """

    counts_with_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self._sharded: ShardedModel | None = None
        self._units: list[nn.Module] = []
        self._gradient_reduction = Reduction()
        self._order: GatherOrder | None = None
        self._watched: list[Any] = []
        self._experts: GradientReducer | None = None
        self._copies_reducer: GradientReducer | None = None

    def setup(self, plan: RunPlan) -> World:
        world = super().setup(plan)
        if self.compression is not None:
            self._gradient_reduction = CodecReduction()
        # Reductions beside that of FSDP2, and backward where it is split, know the parameters that were
        # trainable at the start.
        splits = self._shape is not None and self._shape.splits_backward
        axes = plan.dims.context * plan.dims.expert
        self.follows_requires_grad = (
            axes == 1 and not splits and self._gradient_reduction.follows_requires_grad
        )
        return world

    def needs_mesh(self, dims: ParallelDims) -> bool:
        return dims.world_size > 1

    @property
    def builds_on_one(self) -> bool:
        return super().builds_on_one or (not self.has_stages and self.world.data_parallel_size > 1)

    @classmethod
    def cannot_train(cls, plan: RunPlan) -> dict[Trait, str]:
        return _CANNOT if plan.world_size > 1 else {}

    def place(self, model: nn.Module) -> nn.Module:
        model = self.with_shared_statistics(model)
        self._units = find_units(model, FSDPSection.of(self.config))
        if self.mesh is not None:
            refuse(model, "fsdp", _CANNOT)
            self.remember(model)
        return super().place(model)

    def place_parts(self, model: nn.Module) -> nn.Module:
        if self.mesh is None or self.mesh.dims.data_parallel_size == 1:
            return super().place_parts(model)
        self.apply_levers(model)
        assert self.original is not None
        section, across = FSDPSection.of(self.config), self.mesh.submesh(*self._gradient_reduction.axes)
        units, self._units, group = self._units, [], self.stage_group
        built = self.values if self.built_by_one and self.pipeline is None else None
        self._sharded = ShardedModel(
            model, units, section, self.world, across, self.original, built, group, self.is_expert
        )
        self.values = {}
        use = GradientUse(self, self._sharded.parameters, may_differ=True, group=group)
        self._gradient_reduction.watch(self._sharded, use)
        self._order = GatherOrder(self, self._sharded.units, self.config.hang_timeout, group)
        self._watched = self._sharded.watch()
        return model

    def offload_optimizer(self) -> None:
        return None  # it is where the shards are: see `check_plan`

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        units = [] if self.config.block_classes else find_units(model, FSDPSection.of(self.config))
        return outermost(units[::-1]) or super().blocks(model)

    @property
    def activation_checkpointing(self) -> str:
        asked = FSDPSection.of(self.config).activation_checkpointing
        return "full" if asked else super().activation_checkpointing

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        if self._sharded is not None:
            _check_steps(self.optimizer)
            if isinstance(self.optimizer, torch.optim.LBFGS):
                flatten_whole(self.optimizer)
        copies = None if self.mesh is None else self.mesh.group(*self._gradient_reduction.axes_after)
        if copies is not None:
            # Experts and what is not sharded have reductions of their own.
            held = (
                (name, p)
                for name, p in self.module.named_parameters()
                if not self.is_expert(p) and not self._is_replicated(p)
            )
            self._copies_reducer = build_reducer(self, held, GroupWire(copies), find_unused=True)

    @property
    def _gradient_share(self) -> int:
        """FSDP2 divides by the number of ranks over which it reduces."""
        if self.mesh is None:
            return super()._gradient_share
        return self.mesh.dims.size(*self._gradient_reduction.axes)

    def _is_replicated(self, parameter: nn.Parameter) -> bool:
        """Whether each rank holds all of a parameter of the sharded model."""
        return self._sharded is not None and parameter in self._sharded.replicated

    def wrap(self, step: StepModule) -> Callable[..., Any]:
        if self._sharded is None or self._order is None:
            return step if self.num_contributors == 1 else partial(self._counted, step)
        if self.mesh is not None and self.mesh.dims.expert > 1:
            named = self.module.named_parameters()
            self._experts = self.reducer_of((name, p) for name, p in named if self.is_expert(p))
        return partial(self._forward, step)

    # -- one step --------------------------------------------------------------------

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        if self._sharded is not None and last != self.counting_ends:
            root = self._sharded.root
            root.set_requires_gradient_sync(last or FSDPSection.of(self.config).reduce_every_micro_batch)
            root.set_is_last_backward(last)
        self.counting_ends = last
        return NO_CONTEXT

    def reduce_gradients(self) -> None:
        self._gradient_reduction.begin_exchange()
        if self._copies_reducer is not None:
            self._copies_reducer.finish()

    def _counted(self, step: StepModule, *args: Any) -> Any:
        loss, total, count = step.forward(*args)
        if self._gradient_reduction.counts_in_forward:
            self.add_count(count)
        return loss, total, count

    def _forward(self, step: StepModule, *args: Any) -> Any:
        loss, total, count = self.through("training", partial(step.forward, *args))
        if self.objective.counted and self._gradient_reduction.counts_in_forward:
            self.add_count(count)
        return loss, total, count

    def through(self, kind: str, function: Callable[[], Any]) -> Any:
        if self._sharded is None or self._order is None:
            return function()
        self._sharded.take_assigned()
        with self._order.checked(kind):
            found = self._sharded.root(function)
        written = self._sharded.written() if torch.is_grad_enabled() else None
        if written is not None:
            raise written_weights(f"the parameter '{written}'", "fsdp")
        return found

    def run_window(self, window: Window) -> tuple[Any, Any]:
        seen = super().run_window(window)
        while self._watched:
            self._watched.pop().remove()
        if self._sharded is not None and self.mesh is not None:
            self._gradient_reduction.end_window()
            self._sharded.average_replicated(self.mesh.dims.size(*self._gradient_reduction.axes_after))
            if self._experts is not None:
                self._average_experts(self._experts)
        return seen

    def add_shared(self, pipeline: Pipeline) -> None:
        if self._sharded is None:
            super().add_shared(pipeline)
            return
        self._reshard()  # a stage whose output needs no gradient had no backward, which does
        names = self._sharded.parameters
        used = dict(zip(names, self._sharded.take_used(), strict=True))
        shared = pipeline.tensors.add_shared(
            lambda name, parameter: used.get(name, parameter.grad is not None)
        )
        self._gradient_reduction.add_use([used[name] or name in shared for name in names])

    def _average_experts(self, experts: GradientReducer) -> None:
        """Divide by the number of ranks as FSDP2 does, whose scale the loss has. Collective."""
        gradients = [
            local_part(p.grad) for p in self.module.parameters() if self.is_expert(p) and p.grad is not None
        ]
        if gradients:
            torch._foreach_div_(gradients, self._gradient_share)
        experts.finish()

    def settle_gradients(
        self, max_norm: float | None, want_norm: bool = False
    ) -> tuple[torch.Tensor | None, bool]:
        self._gradient_reduction.begin_step()
        return super().settle_gradients(max_norm, want_norm)

    # -- evaluation ------------------------------------------------------------------

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        if self.pipeline is not None:
            return super().evaluate(batch, num_samples)
        found: dict[str, Any] = self.through("evaluation", partial(super().evaluate, batch, num_samples))
        return found

    @property
    def copies_in_evaluation(self) -> bool:
        follows = self._order is not None and self.pipeline is None and not self.shares_model
        return (super().copies_in_evaluation or self._sharded is not None) and not follows

    def evaluate_stand_in(self, batch: Any) -> None:
        if self._sharded is None or self._order is None or self.copies_in_evaluation:
            super().evaluate_stand_in(batch)
        else:
            self._order.follow("evaluation", self._sharded.gather)

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if self._sharded is None:
            return
        self._sharded.reshard()
        if not training:
            self.share_buffers()

    # -- state -----------------------------------------------------------------------

    def export_state(self) -> BackendState:
        self._reshard()
        return super().export_state()

    def weight_digests(self, names: Collection[str]) -> Mapping[str, int] | None:
        self._reshard()
        return super().weight_digests(names)

    def import_state(self, reader: StateReader) -> None:
        self._reshard()
        super().import_state(reader)

    def _reshard(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()

    free_gathered = _reshard

    def replicated(self) -> None:
        return None

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        self._reshard()
        return super().whole_model()

    def release(self) -> None:
        self._reshard()
        for reducer in (self._experts, self._copies_reducer):
            if reducer is not None:
                reducer.remove()
        self._sharded = self._order = self._experts = self._copies_reducer = None
        self._gradient_reduction = Reduction()
        super().release()


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Refuse the optimizers of torch whose step DTensors do not support (as of torch 2.13)."""
    reasons = {
        torch.optim.Adafactor: "Adafactor needs unsharded parameters (row/column statistics)",
    }
    for kind, reason in reasons.items():
        if isinstance(optimizer, kind):
            raise UserError(
                f"{reason}; FSDP2 shards them",
                field="optimizer",
                got=type(optimizer).__name__,
                allowed="elementwise optimizers, such as SGD and AdamW, and Muon",
                remedy="Use backend='pytorch-ddp', or another optimizer",
            )
