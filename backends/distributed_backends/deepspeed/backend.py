"""DeepSpeedBackend: DeepSpeed's engine under the one loop."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.torch_state import export_replicated, import_replicated
from distributed.communication.broadcast import broadcast_values
from distributed.communication.wire import GroupWire
from distributed.errors import UserError
from distributed.interfaces.backend import StepResult
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.parallel.gradient_reducer import GradientReducer, build_reducer
from distributed.resilience.divergence import trained
from distributed.training.gather_order import GatherOrder
from distributed.training.gradient_use import GradientUse, UsedParameters
from distributed.training.mixins.stepping import has_modes, lacks_closure
from distributed.training.model_traits import (
    COMPLEX,
    EMPTY,
    HOOKED,
    SPARSE,
    Trait,
    refuse,
    written_weights,
)
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.torch_backend import StepModule
from distributed.training.whole_model import copy_with, read_only
from distributed_backends.deepspeed.hooks import stage_of
from distributed_backends.deepspeed.import_deepspeed import import_deepspeed
from distributed_backends.deepspeed.loss_scale import EngineScaler, NativeScaler, native_rule
from distributed_backends.deepspeed.options import check_weights, native_optimizer, weights_dtype
from distributed_backends.deepspeed.restore import Before
from distributed_backends.deepspeed.state import ShardedOptimizer

__all__ = ["DeepSpeedBackend"]


def _cannot(stage: int) -> dict[Trait, str]:
    """Traits of parameters that DeepSpeed cannot train with a stage of ZeRO, and why."""
    found = {
        SPARSE: "DeepSpeed flattens dense gradients",
        COMPLEX: "DeepSpeed reduces real gradients only",
    }
    if stage > 0:
        found[HOOKED] = "ZeRO reduces gradients in partitions, so that none is whole"
    if stage == 3:
        found[EMPTY] = "ZeRO 3 does not gather such parameters"
    return found


class DeepSpeedBackend(ProcessGroupBackend):
    """DeepSpeed's ZeRO under the one loop: stage 0 reduces gradients, 1 shards the optimizer,
    2 the gradients besides, 3 the parameters too.

    **The engine** makes the mean over ranks, shards, gathers, and steps. The values that the
    contracts fix are passed to it at each step: where a window ends, the largest norm, and one scale, which
    holds the loss scale of fp16 and the count of the global batch (C2, C6). Its own gradient
    norm is rounded to float32; ours takes its place.

    **Precision** is autocast over weights in their own dtype, as on every backend. DeepSpeed's
    own way, 16-bit weights with float32 masters, is selected by ``bf16`` or ``fp16`` in
    the ``deepspeed_config``.
    """

    counts_with_gradients = False
    follows_requires_grad = False
    repeats_windows = False

    def __init__(self) -> None:
        super().__init__()
        self.sharded: ShardedOptimizer | None = None
        self.engine: Any = None
        self._in_callers_process = False
        self._order: GatherOrder | None = None
        self._reducer: GradientReducer | None = None
        self._environment: dict[str, str | None] = {}
        self._idle: dict[Tensor, dict[str, Any]] = {}
        self._written: dict[str, nn.Parameter] = {}
        self._versions: list[int] = []

    @property
    def parts(self) -> Mapping[Tensor, Any]:
        return {} if self.sharded is None else self.sharded.parts

    def replicated(self) -> dict[str, Tensor] | None:
        return trained(self.module) if self.stage < 3 else None

    # -- setup -----------------------------------------------------------------------------

    def setup(self, plan: RunPlan) -> World:
        self.stage = stage_of(plan.config)
        self.scaler_class = EngineScaler if self.stage > 0 else NativeScaler
        world = super().setup(plan)
        self._joined = plan.joined is not None
        if world.size == 1:
            self._in_callers_process = True
            self._init_single_rank_group(plan)
        self._export_local_rank(world)
        import_deepspeed(world.device)
        from distributed_backends.deepspeed.engine import attach_process_group, check_reading

        attach_process_group(world.device)
        check_reading(plan.config, self.stage)
        rule = native_rule(plan.config, self.stage)
        if isinstance(self.scaler, NativeScaler) and rule is not None:
            self.scaler.follow(rule)
        return world

    def _init_single_rank_group(self, plan: RunPlan) -> None:
        """Initialize a process group of one, which DeepSpeed needs also on a single rank."""
        if not dist.is_initialized():
            kind = "gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
            self._owns_group = True
        elif dist.get_world_size() != 1:
            raise UserError(
                f"this process is in a process group of {dist.get_world_size()} ranks, which"
                " DeepSpeed would use",
                field="num_processes",
                got=1,
                allowed=str(dist.get_world_size()),
                remedy="Train on all of them, or destroy the group first",
            )

    def _export_local_rank(self, world: World) -> None:
        """Export LOCAL_RANK, from which DeepSpeed reads a rank's device, under every launcher."""
        index = world.device.partition(":")[2] or str(world.local_rank)
        # Under mpirun the two have to agree, or DeepSpeed stops.
        for name, value in (("LOCAL_RANK", index), ("OMPI_COMM_WORLD_LOCAL_RANK", None)):
            self._environment[name] = os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def teardown(self) -> None:
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._environment = {}
        if self._in_callers_process:
            gc.collect()  # the engine refers to itself, and would keep its memory and the group's sockets
        super().teardown()

    def place(self, model: nn.Module) -> nn.Module:
        if self._joined:
            # Ranks that we started have the same weights; others build their own.
            broadcast_values([*model.parameters(), *model.buffers()])
        self._before = Before(model)
        if self.stage < 3:
            return super().place(model)
        self.apply_levers(model)
        for module in model.modules():  # parameters move one by one, as they are cut
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.world.device)
        return model

    def prepare(self, task: Task) -> None:
        if not task.run_state:  # a later fit continues with the optimizer of the first
            task = replace(task, optimizer=native_optimizer(self.config, task.optimizer))
        super().prepare(task)

    def offload_optimizer(self) -> None:
        return None  # the engine does so: see `engine_options`

    @classmethod
    def cannot_train(cls, plan: RunPlan) -> dict[Trait, str]:
        return _cannot(plan.spec.zero_stage(plan.config) if plan.spec.zero_stage else 0)

    def wrap(self, step: StepModule) -> Callable[..., Any]:
        from distributed_backends.deepspeed.engine import Root, build_engine, engine_options

        optimizer, model = self.optimizer, self.module
        cannot = _cannot(self.stage)
        if not self._hooks:
            cannot.pop(HOOKED, None)
        refuse(model, "deepspeed", cannot)
        check_weights(optimizer, model, self.stage, self.config)
        weights = weights_dtype(self.config, self.stage, model)
        members = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        whole = {p: p.data for group in members for p in group} if weights.itemsize == 2 else {}
        earlier = dict(optimizer.state)
        self._idle = {p: state for p, state in earlier.items() if not p.requires_grad}
        if self.stage:
            if has_modes(optimizer):
                raise self._cannot_switch()
            optimizer.state.clear()
        numel = sum(p.numel() for p in self._parameters)
        options = engine_options(self.config, self._batch, self.stage, weights, numel)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._use, self._used = GradientUse(self, trainable), UsedParameters(trainable)
        root = Root(model, super().autocast)
        self.engine = build_engine(root, optimizer, options, self.world.device, weights)
        # Alone, stage 0 would copy all gradients into one tensor, reduce it, and copy them back.
        own = self.world.size == 1 or self.compression is not None
        self.engine.enable_backward_allreduce = self.stage > 0 or not own
        if self.compression is not None:
            self.compression.begin_again()
            self._reducer = build_reducer(self, trainable.items(), GroupWire(), find_unused=True)
        if self.stage == 3 and self.world.size > 1:
            gathering = [m for m in model.modules() if any(p is not None for p in m._parameters.values())]
            self._order = GatherOrder(self, gathering, self.config.hang_timeout)
        if self.stage:
            self._take_over(members, earlier)
        self.trains_copies = self.stage > 0 or bool(whole)
        if self.sharded is not None and whole:
            self.sharded.set_masters(whole)
        return partial(self._forward, step.forward)

    def _cannot_switch(self) -> UserError:
        return UserError(
            "the optimizer has train() and eval(), which change the weights, and ZeRO would keep others",
            field="optimizer",
            got=type(self.optimizer).__name__,
            allowed="optimizers without these, or zero_stage=0",
            remedy="Set zero_stage=0, or backend=pytorch-ddp or fsdp",
        )

    def _take_over(self, members: list[list[nn.Parameter]], earlier: dict[Tensor, dict[str, Any]]) -> None:
        zero = self.engine.optimizer
        self.sharded = ShardedOptimizer(zero, self.optimizer, members, self.module)
        self.sharded.take_whole(earlier)
        zero.custom_loss_scaler, zero.external_loss_scale = True, 1.0
        if self.stage < 3:
            zero.reduce_ipg_grads = partial(self._reduce_compared, zero.reduce_ipg_grads)
        self.sharded.use_exact_norm(self.gradient_norm)

    def engine_outside_fit(
        self, plan: RunPlan, model: Any, optimizer: Any, scheduler: Any
    ) -> tuple[Any, Any, Any]:
        from distributed_backends.deepspeed.own_loop import initialize

        world = self.setup(plan)
        refuse(model, "deepspeed", _cannot(self.stage))
        if world.size > 1:
            broadcast_values([*model.parameters(), *model.buffers()])
        return initialize(plan, world, model, optimizer, scheduler)

    # -- one step --------------------------------------------------------------------------

    @property
    def placeholders(self) -> str:
        return "computed"  # the engine counts backward passes, and reduces in the order of their hooks

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # the root enters it: DeepSpeed switches off what surrounds it

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        self.counting_ends = last
        return nullcontext()

    def _forward(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._checked("training"):
            loss, total, count = self.engine(function, *args)
        self._check_written()
        if self.objective.counted and self.world.size > 1 and self.compression is None:
            self.add_count(count)
        return loss, total, count

    def _checked(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self._order is None else self._order.checked(kind)

    def _note_versions(self) -> None:
        """Take the parameters as they are now for written by DeepSpeed alone."""
        self._versions = [p._version for p in self._written.values()]

    def _check_written(self) -> None:
        """Raise a UserError if something wrote to a parameter; DeepSpeed writes to flat tensors."""
        for (name, parameter), version in zip(self._written.items(), self._versions, strict=True):
            if parameter._version != version:
                raise written_weights(f"the parameter '{name}'", "deepspeed")

    def held_weights(self) -> dict[str, Tensor]:
        return {name: self._own_part(tensor) for name, tensor in super().held_weights().items()}

    def _own_part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a weight that stage 3 divides, whether it is whole now or not."""
        part = getattr(tensor, "ds_tensor", None)
        if part is None or tensor.numel() == 0:
            return tensor if part is None else part
        return tensor.detach().flatten()[self.world.rank * part.numel() :][: part.numel()]

    def callback_scope(self) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        from distributed_backends.deepspeed.empty_weights import RefusesEmptyWrites

        return RefusesEmptyWrites(self.module)

    def run_window(self, window: Any) -> tuple[Any, Any]:
        if self.sharded is not None:
            self.sharded.forget_gradients()
            if not self._written:
                self._written = dict(self.module.named_parameters())
                self._note_versions()
        seen = super().run_window(window)
        self._use.begin()
        if self._reducer is not None:
            self.count_first()
            self._reducer.finish()
        return seen

    def backward(self, loss: Tensor) -> None:
        # The engine must not be given the very tensor that it returned: of stage 0's, a hook divides by
        # the accumulation before the engine's mark against that is seen.
        loss = loss * 1.0 if self.scaler is None else self.scaler.scale(loss)
        with self.engine.module.own_linear():
            self.engine.backward(loss, scale_wrt_gas=False)
        self._use.add(self._used.take())

    def _reduce_compared(self, reduce: Callable[..., None], comm_dtype: Any = None) -> None:
        """Let ZeRO 1 and 2 send what a backward has left in their buckets, if it is the same on all ranks."""
        if comm_dtype is None:  # the end of a backward; within one, a bucket is full
            self._use.compare(self._used.marks)
        reduce(comm_dtype=comm_dtype)

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        self._refuse_unused(self._use.finish())
        if self.sharded is None:
            return super().optimizer_step(max_norm, want_norm)
        start = perf_counter()
        zero, ratio = self.engine.optimizer, self._count_ratio()
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        if ratio is not None and float(ratio) > 0.0:
            scale /= float(ratio)
        zero.clip_grad, zero.external_loss_scale = max_norm or 0.0, scale
        try:
            self.engine.step()
        except Exception as error:
            if not lacks_closure(error):
                raise
            self._check_repeats()
        self._note_versions()
        zero.external_loss_scale = 1.0
        skipped = not self.engine.was_step_applied()
        if isinstance(self.scaler, EngineScaler):
            self.scaler.after_step(self.optimizer, skipped)
        self.timers.add("optimizer", perf_counter() - start)
        return StepResult(zero._global_grad_norm, skipped)

    def scaled_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Stage 0: let the engine step unless the scaler saw a non-finite gradient."""
        if self.scaler is None:
            self.engine.step()
            return False
        found = self.scaler._found_inf_per_device(optimizer)
        overflowed = any(bool(value) for value in found.values())
        if not overflowed:
            self.engine.step()
        self.scaler.update()
        return overflowed

    def _refuse_unused(self, names: list[str]) -> None:
        """Raise a UserError if no rank used some trainable parameter: DeepSpeed would step with zeros."""
        if names:
            raise UserError(
                f"no sample of the global batch used '{names[0]}'"
                + (f" and {len(names) - 1} more trainable parameters" if len(names) > 1 else "")
                + ", and DeepSpeed would step with gradients of zero there, so that weight decay and momentum"
                " change values",
                field="backend",
                got=self.spec.name,
                allowed="serial, pytorch-ddp, fsdp, horovod, for models with unused parameters",
                remedy="Freeze unused parameters with requires_grad_(False), or choose one of these backends",
            )

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Norm of the sharded gradient, with the engine's scale, in float64 on the CPU."""
        if self.sharded is None:
            return super().gradient_norm()
        return self.sharded.gradient_norm(self.world.device)

    # -- evaluation ------------------------------------------------------------------------

    @property
    def copies_in_evaluation(self) -> bool:
        return self.stage == 3 and self.world.size > 1

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        with self._checked("evaluation"):
            found: dict[str, Any] = self.engine.module(super().evaluate, batch, num_samples)
        return found

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if self.sharded is not None:
            self.sharded.release_gathered()
        if not training and self.world.size > 1:
            broadcast_values(self.module.buffers())

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        if self.sharded is None or not self.sharded.partitioned:
            return super().whole_model()
        return read_only(self._whole_copy(self.sharded))

    @contextmanager
    def _whole_copy(self, sharded: ShardedOptimizer) -> Iterator[nn.Module]:
        sharded.release_gathered()
        values: Any = dict(sharded.whole_weights())
        with self._before.undone():
            found = copy_with(self.module, values)
        values.clear()
        yield found

    # -- state -----------------------------------------------------------------------------

    def export_state(self) -> BackendState:
        self._check_trainable()
        if self.sharded is None:
            return super().export_state()
        shown, pieces = self.sharded.view()
        world = self.world
        state = export_replicated(
            self.module,
            shown,
            self.scaler_state(),
            world.rank,
            world.size,
            pieces=pieces,
            parts=self.parts,
            held=self.exports,
        )
        state.chunks += self.changed_buffers()
        return state

    def weight_digests(self, names: Collection[str]) -> Mapping[str, int] | None:
        if self.sharded is not None:
            self.sharded.release_gathered()
        return super().weight_digests(names)

    def import_state(self, reader: StateReader) -> None:
        sharded = self.sharded
        if sharded is None:
            super().import_state(reader)
            return
        shown, pieces = sharded.view()
        sharded.release_gathered()
        self.report_differences(reader)
        import_replicated(reader, self.module, shown, pieces=pieces, parts=sharded.parts)
        self.restore_buffers(reader)
        sharded.take(shown)
        if sharded.partitioned:
            sharded.spread_masters()
        else:
            import_replicated(reader, self.module, None)
        if self.scaler is not None and reader.scaler:
            self.scaler.load_state_dict(reader.scaler)

    def release(self) -> None:
        super().release()
        self._release_engine()

    def follow_trainable(self) -> None:
        """Build the engine again, around what is trained now."""
        self._release_engine()
        self._before = Before(self.module)
        self.model = self.wrap(self.step_module)
        self._written = dict(self.module.named_parameters()) if self.stage else {}
        self._note_versions()

    @torch.no_grad()
    def _release_engine(self) -> None:
        """Give the optimizer its own parameters back."""
        if self.engine is None:
            return
        self._used.remove()
        if self._reducer is not None:
            self._reducer.remove()
        engine, sharded, self.engine, self.sharded = self.engine, self.sharded, None, None
        self._order = None
        if sharded is None:
            engine.destroy()
            self._before.restore(iter(()))
            return
        sharded.release_gathered()
        weights = sharded.whole_weights()
        added = sharded.give_back()
        engine.destroy()
        self.optimizer.param_groups += added
        self._before.restore(weights)
        self.optimizer.state.update(self._idle)
