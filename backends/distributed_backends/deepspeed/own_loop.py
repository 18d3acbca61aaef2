"""DeepSpeed's engine for a loop of the user's own, which calls it, its ``backward`` and its ``step``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distributed.errors import UserError
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.training.mixins.stepping import requires_closure
from distributed.training.optimizers import build_optimizer, check_optimizer, check_trainable
from distributed_backends.deepspeed.engine import (
    Engine,
    WideEngine,
    build_engine,
    engine_options,
    linear_of,
    without_auto,
)
from distributed_backends.deepspeed.hooks import stage_of
from distributed_backends.deepspeed.options import check_weights, native_optimizer, weights_dtype
from distributed_backends.deepspeed.section import native_config
from distributed_backends.deepspeed.state import ShardedOptimizer

__all__ = ["initialize"]


class _OwnLoop(Engine):
    """The engine as a user calls it: checks what a mean over ranks needs, and leaves torch as it was."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training:
            self._check_samples(tree_leaves((args, kwargs)))  # a batch may be a dict or a tuple
        kind = self.device.type
        if kind == "cuda" and torch.is_autocast_enabled(kind):
            raise UserError(
                "DeepSpeed switches torch.autocast off inside of its engine",
                field="mixed_precision",
                got="torch.autocast around engine(...)",
                remedy="Leave it out, and pass mixed_precision='bf16' to initialize_deepspeed",
            )
        with linear_of(self.linear):
            return super().forward(*args, **kwargs)

    def _check_samples(self, inputs: Sequence[Any]) -> None:
        """Raise a UserError unless this rank brings its share of the batch: the engine averages over ranks,
        which is the mean over samples for equal numbers only."""
        first = next((x for x in inputs if isinstance(x, Tensor) and x.dim()), None)
        share: int = self.train_micro_batch_size_per_gpu()
        if first is not None and len(first) != share:
            raise UserError(
                f"the engine was called with {len(first)} samples on this rank",
                field="train_batch_size",
                got=self.train_batch_size(),
                allowed=f"calls with {share} = train_batch_size / {self.dp_world_size} ranks"
                f" / {self.gradient_accumulation_steps()} calls for each step",
                remedy=f"Use DataLoader(..., batch_size={share}, drop_last=True), or Trainer, which counts"
                " samples",
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        with linear_of(self.linear):
            # The very tensor that the engine returned would be divided by the accumulation twice.
            return super().backward(loss * 1.0, *args, **kwargs)

    def clip_fp32_gradients(self) -> None:
        """Stage 0 in the dtype of the gradients; DeepSpeed's own norm is rounded to float32."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.gradient_clipping())


class _OwnWideLoop(_OwnLoop, WideEngine):
    """`_OwnLoop` for float64 weights."""


def initialize(
    plan: RunPlan, world: World, model: nn.Module, optimizer: Any, scheduler: Any
) -> tuple[Any, Any, Any]:
    """(engine, its optimizer, scheduler) around `model`, on ranks that have met and have the same weights."""
    config, stage = plan.config, stage_of(plan.config)
    check_trainable(model)
    _place(model, world.device, whole=stage < 3)
    weights = weights_dtype(config, stage, model)
    if config.mixed_precision in ("fp16", True) and weights is not torch.float16:
        raise UserError(
            "an engine in a loop of your own has no loss scaler for fp16 over float32 weights",
            field="mixed_precision",
            got=config.mixed_precision,
            allowed="bf16, fp32; on a GPU also fp16.enabled in deepspeed_config, with DeepSpeed's scaler",
            remedy="Use mixed_precision='bf16', or Trainer",
        )
    if config.mixed_precision == "bf16" and weights is not torch.bfloat16:
        kind = world.device.partition(":")[0]
        model.forward = torch.autocast(kind, torch.bfloat16)(model.forward)
    built = build_optimizer(native_optimizer(config, optimizer), model, config, plan.learning_rate)
    check_optimizer(built, model)
    if requires_closure(built):
        raise UserError(
            "DeepSpeed's engine steps the optimizer without a closure, which it needs",
            field="optimizer",
            got=type(built).__name__,
            remedy="Choose an optimizer whose step() needs no closure, or use Trainer with pytorch-ddp",
        )
    check_weights(built, model, stage, config)
    members = [list(group["params"]) for group in built.param_groups if group["params"]]
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    options = engine_options(config, plan.batch, stage, weights, numel)
    options["gradient_clipping"] = config.gradient_clipping or 0.0
    if weights is torch.float16:
        options["fp16"] = {**without_auto(native_config(config)["fp16"]), "enabled": True}
    engine = build_engine(model, built, options, world.device, weights, (_OwnLoop, _OwnWideLoop))
    engine.enable_backward_allreduce = stage > 0 or world.size > 1
    if stage and weights.itemsize > 2:
        sharded = ShardedOptimizer(engine.optimizer, built, members, model)
        sharded.use_exact_norm(lambda: sharded.gradient_norm(world.device))
    engine.lr_scheduler = scheduler(built) if callable(scheduler) else scheduler
    return engine, engine.optimizer, engine.lr_scheduler


def _place(model: nn.Module, device: str, whole: bool) -> None:
    """Move `model` to `device`; under ZeRO 3 the buffers alone, because parameters move as they are cut."""
    if whole:
        model.to(device)
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
