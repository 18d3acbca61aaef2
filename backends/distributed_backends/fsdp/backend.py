"""FSDPBackend: shard parameters, gradients and optimizer state over the ranks (torch's fully_shard)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import cut_like, is_sharded, local_part, whole
from distributed.communication.broadcast import broadcast_values
from distributed.errors import UserError
from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.training.blocks import outermost
from distributed.training.gather_order import GatherOrder
from distributed.training.gradient_use import GradientUse
from distributed.training.model_traits import HOOKED, SPARSE, refuse, written_weights
from distributed.training.optimizers import follow_parameters
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.torch_backend import StepModule, group_by_dtype
from distributed.training.whole_model import read_only
from distributed_backends.fsdp.deferred_build import build_without_data
from distributed_backends.fsdp.section import FSDPSection
from distributed_backends.fsdp.sharded_model import ShardedModel
from distributed_backends.fsdp.units import find_units

__all__ = ["FSDPBackend"]


_CANNOT = {
    HOOKED: "FSDP2 would not call it, because it replaces parameters by shards",
    SPARSE: "FSDP2 shards dense gradients",
}


class ShardedScaler(torch.amp.GradScaler):
    """Unscale this rank's gradients; an overflow on one rank counts on all (C8)."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        found: dict[torch.device, Tensor] = {}
        for part in group_by_dtype(gradients):
            device = part[0].device
            if part[0].dtype is torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            seen = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(part, seen, inv_scale.to(device))
        for seen in found.values():
            dist.all_reduce(seen, dist.ReduceOp.MAX)
        return found


class FSDPBackend(ProcessGroupBackend):
    """torch's FSDP2 under the one loop. FSDP2 does not shard on a single rank: the
    whole model stays on its device.

    **Precision** is autocast over parameters in their own dtype, as under ``pytorch-ddp``, so
    that the same config is the same training. (MixedPrecisionPolicy's `param_dtype` would cast
    whole modules instead.) Only ``fsdp.reduce_dtype`` changes the dtype of the
    reduction.

    **Counts** (C2). Where the number of tokens of a global batch is known after forward only, the
    ranks add their counts in a separate small collective, which runs during the last backward. A
    parameter that carries the count, as under DDP, cannot be sharded.

    **BatchNorm** as under DDP: statistics per rank while training, rank 0's for validation.
    """

    counts_with_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self._sharded: ShardedModel | None = None
        self._built_by_one = False
        self._use: GradientUse | None = None
        self._order: GatherOrder | None = None

    def setup(self, plan: RunPlan) -> World:
        if plan.world_size > 1:
            self.scaler_class = ShardedScaler
        world = super().setup(plan)
        self._joined = plan.joined is not None
        return world

    def build(self, model: Any) -> nn.Module:
        self._built_by_one = self.world.size > 1 and not isinstance(model, nn.Module)
        if self._built_by_one and self.world.rank > 0:
            return build_without_data(model, self.config.seed)
        return super().build(model)

    def place(self, model: nn.Module) -> nn.Module:
        section = FSDPSection.of(self.config)
        if self.config.sync_batchnorm and self.world.size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        units = find_units(model, section)
        if self.world.size == 1:
            return super().place(model)
        refuse(model, "fsdp", _CANNOT)
        self.apply_levers(model)
        if self._joined and not self._built_by_one:
            # Ranks that we started have the same weights; others built their own.
            broadcast_values([*model.parameters(), *model.buffers()])
        self._sharded = ShardedModel(model, units, section, self.world, self._built_by_one)
        self._use = GradientUse(self, self._sharded.parameters, may_differ=True)
        self._order = GatherOrder(self, self._sharded.units, self.config.hang_timeout)
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
        self._cut_optimizer_state()
        for group in self.optimizer.param_groups:
            # One fused kernel cannot take sharded and replicated parameters together.
            if len({is_sharded(p) for p in group["params"]}) > 1:
                group.update({flag: False for flag in ("foreach", "fused") if flag in group})

    def _cut_optimizer_state(self) -> None:
        """Shard the state of an optimizer that an earlier fit used, which is of whole parameters."""
        for parameter, state in self.optimizer.state.items():
            for slot, value in state.items():
                if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[slot] = cut_like(parameter, value)

    def wrap(self, step: StepModule) -> Callable[..., Any]:
        if self._sharded is None or self._order is None:
            return step
        return partial(self._forward, self._sharded, self._order, step)

    # -- one step --------------------------------------------------------------------

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        if self._sharded is not None and last != self.counting_ends:
            root = self._sharded.root
            root.set_requires_gradient_sync(last or FSDPSection.of(self.config).reduce_every_micro_batch)
            root.set_is_last_backward(last)
            self.counting_ends = last
        return nullcontext()

    def _forward(self, sharded: ShardedModel, order: GatherOrder, step: StepModule, *args: Any) -> Any:
        with order.checked("training"):
            loss, total, count = sharded.root(step.forward, *args)
        written = sharded.written()
        if written is not None:
            raise written_weights(written, "fsdp")
        if self.objective.counted:
            self.add_count(count)
        return loss, total, count

    def run_window(self, window: Window) -> tuple[Any, Any]:
        if self._sharded is None or self._use is None:
            return super().run_window(window)
        seen = super().run_window(window)
        self._use.add(self._sharded.take_used())
        self._use.begin()
        self._sharded.average_replicated()
        return seen

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        if self._sharded is not None and self._use is not None:
            for name in self._use.finish():
                self._sharded.parameters[name].grad = None
        return super().optimizer_step(max_norm, want_norm)

    def gradients(self) -> list[Tensor]:
        return [local_part(gradient) for gradient in super().gradients()]

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        if self._sharded is None:
            return super().gradient_norm()
        gradients = super().gradients()
        square = self._square([local_part(g) for g in gradients if is_sharded(g)])
        dist.all_reduce(square, group=self._sharded.group)
        return (square + self._square([g for g in gradients if not is_sharded(g)])).sqrt()

    def _square(self, gradients: list[Tensor]) -> Tensor:
        """Squared L2 norm over `gradients`, in float64 on this rank's device."""
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for norm in torch._foreach_norm(gradients) if gradients else ():
            square += norm.to(square).square()
        return square

    # -- evaluation ------------------------------------------------------------------

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        if self._sharded is None or self._order is None:
            return super().evaluate(batch, num_samples)
        with self._order.checked("evaluation"):
            found: dict[str, Any] = self._sharded.root(super().evaluate, batch, num_samples)
        return found

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if self._sharded is None:
            return
        self._sharded.reshard()
        if not training:
            broadcast_values(self.module.buffers())

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        return super().whole_model() if self._sharded is None else read_only(self._sharded.whole_copy())

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

    @torch.no_grad()
    def release(self) -> None:
        super().release()
        if self._sharded is None:
            return
        self._sharded.reshard()
        cut = dict(self.module.named_parameters())
        self._sharded.make_whole()
        self._sharded = self._use = self._order = None
        follow_parameters(self.optimizer, cut, self.module)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                for slot, value in state.items():
                    if is_sharded(value):
                        state[slot] = whole(value).to(parameter.device)


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Refuse the one optimizer of torch whose step DTensors do not support (as of torch 2.13)."""
    if isinstance(optimizer, torch.optim.Adafactor):
        raise UserError(
            "Adafactor needs unsharded parameters (row/column statistics); FSDP2 shards them",
            field="optimizer",
            got=type(optimizer).__name__,
            allowed="elementwise optimizers, such as SGD and AdamW, and Muon",
            remedy="Use backend='pytorch-ddp', or another optimizer",
        )
