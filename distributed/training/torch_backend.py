"""The plain form of a torch backend: what DDP, FSDP2 and the like have in common.

A backend built on this overrides `setup` (how ranks meet), `wrap` (what surrounds the
model) and, where its engine fuses them, `run_window` and `optimizer_step`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.initial_weights import take_weights
from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.collectives import OneRank
from distributed.interfaces.placement import World
from distributed.interfaces.plan import BatchPlan, RunPlan
from distributed.interfaces.task import Task
from distributed.planner.auto_batch import most_divided
from distributed.training.agreement import Settings, check_same_model, check_same_torch
from distributed.training.batch_transfer import Transfers
from distributed.training.carried_state import StateWatch
from distributed.training.compression import CANNOT_SEND, Compression
from distributed.training.deferred_hooks import DeferredHooks
from distributed.training.gradient_scaling import (
    group_by_dtype,
    inverse,
    multiply_in_place,
    on_host,
    scale_factor,
)
from distributed.training.last_batch import LastBatch
from distributed.training.loss_parameters import with_loss
from distributed.training.mixins.accumulation import NO_CONTEXT, AccumulationMixin
from distributed.training.mixins.evaluation import EvaluationMixin
from distributed.training.mixins.levers import LeversMixin
from distributed.training.model_traits import (
    META,
    Trait,
    check_chosen_batch,
    check_materialized,
    check_micro_batches,
    check_slices_of_one,
    check_whole,
    refuse,
)
from distributed.training.module_modes import ModuleModes
from distributed.training.objective import Objective
from distributed.training.optimizers import (
    build_model,
    build_optimizer,
    check_optimizer,
    check_trainable,
    follow_parameters,
)
from distributed.training.phase_timers import PhaseTimers
from distributed.training.placeholders import Untouched, with_stand_ins
from distributed.training.rank_state import RankState
from distributed.training.routing_traits import check_routing
from distributed.training.step_module import StepModule
from distributed.training.whole_model import read_only

__all__ = ["StepModule", "TorchBackend", "group_by_dtype"]


class TorchBackend(OneRank, LeversMixin, AccumulationMixin, EvaluationMixin, RankState):
    """One rank of data-parallel training, alone unless a subclass adds collectives.

    Attributes:
        model: what is called: a `StepModule`, wrapped or not.
        timers: where forward, backward and optimizer seconds go.
        counts_with_gradients: a count that only the ranks together know is reduced as the gradient
            of a parameter of `StepModule`; a subclass that shards reduces it by itself.
        sums_gradients: reduction adds the gradients of the ranks; False divides the sum by their number.
        trains_copies: what a callback changes of the module's weights is discarded by the next step.
    """

    counts_with_gradients = True
    sums_gradients = False
    trains_copies = False
    model: Any
    objective: Objective
    last_batch: LastBatch

    def __init__(self) -> None:
        super().__init__()
        self.timers = PhaseTimers()
        self._count: Any = None
        self._num_samples = 0
        self._modes = ModuleModes()
        self._transfers: Transfers | None = None
        self._watch: StateWatch | None = None

    # -- who and where ---------------------------------------------------------------

    def setup(self, plan: RunPlan) -> World:
        self.adopt(plan)
        self.world = World(host=socket.gethostname(), device=plan.device_of(0))
        return self.world

    def adopt(self, plan: RunPlan) -> None:
        """Take what the plan decided: configuration, batch, codec and precision."""
        self.config, self._batch = plan.config, plan.batch
        self._compares_samples = plan.compares_samples
        self._learning_rate = plan.learning_rate
        if plan.codec is not None and plan.world_size > 1:
            self.compression = Compression(plan.codec, plan.config)
            self.follows_requires_grad = self.counts_with_gradients = False
            self.sums_gradients = True
        self.setup_precision(
            plan.precision, plan.device, plan.config.scaler_init_scale, plan.config.scaler_growth_interval
        )

    def take_batch(self, plan: RunPlan) -> None:
        self._batch, self._compares_samples = plan.batch, plan.compares_samples

    def prepare(self, task: Task) -> None:
        if self.compression is not None and task.run_state:
            self.compression.left = task.run_state["backend"]
        built = self.build(task.model)
        if self.config.init_from is not None and task.progress is None:
            take_weights(self.config.init_from, built, self.world.rank == 0)
        built = with_loss(built, task.loss_fn)
        built.zero_grad(set_to_none=True)
        self._check_model(built, task)
        self._hooks = DeferredHooks(built.parameters())
        before = dict(built.named_parameters())
        self.module = self.place(built)
        if isinstance(task.optimizer, torch.optim.Optimizer):
            follow_parameters(task.optimizer, before, self.module)
        self.optimizer = build_optimizer(task.optimizer, self.module, self.config, self._learning_rate)
        check_optimizer(self.optimizer, self.module)
        self.prepare_step()
        if self.config.optimizer_offload:
            self.offload_optimizer()
        batch = self._checked_batch
        several = batch.global_batch_size * math.prod(self.cut_into) > batch.batch_size
        self.objective = Objective(
            task.loss_fn,
            task.training_step,
            task.metrics,
            task.validation_step,
            self.world.device,
            warns=self.world.rank == 0 and several,
            is_chosen=self.config.chooses_batch,
            compares_samples=self._compares_samples,
        )
        self._declare_counts(task)
        # A later fit counts its steps from where it begins.
        max_steps = self.config.max_steps if task.progress is None else None
        drop_last = self.config.data.drop_last
        self.last_batch = LastBatch(self.module, self._batch, task.train_data, drop_last, max_steps)
        self.fewest_samples = self.last_batch.least
        parallel = self.num_contributors > 1 and self.counts_with_gradients
        unused = self.config.find_unused_parameters and self.placeholders == "zeros"
        # Where a rank without a sample must not mark parameters as used, its count alone has a gradient.
        counts = parallel and (self.objective.counted or unused)
        self.step_module = StepModule(self.module, self.objective, self._gradient_share if counts else 0)
        self.step_module.placeholders = "skipped" if unused else self.placeholders
        wrapped = self.wrap(self.step_module)
        # Unwrapped, it is called as a plain function: a module's __call__ would cost, and do nothing.
        self.model = self.step_module.forward if wrapped is self.step_module else wrapped
        if task.run_state and self.scaler is not None:
            self.scaler.load_state_dict(task.run_state["scaler"])
        self._watch = StateWatch(self, several)
        self.mark_buffers()
        self._note_trainable()

    def _check_model(self, built: nn.Module, task: Task) -> None:
        """Raise a UserError if these ranks cannot train the model exactly. Collective."""
        check_trainable(built)
        if self.config.chooses_batch:
            check_chosen_batch(built)
        check_materialized(built, self.config.backend, self.world.size)
        check_whole(built)
        check_slices_of_one(built, self.config, self.world.size)
        check_same_torch(self)
        check_same_model(self, built)
        batch, parts, is_chosen = self._checked_batch, self.cut_into, self.config.chooses_batch
        check_micro_batches(built, self.config.backend, self.world.size, batch, parts, is_chosen)
        check_routing(built, batch, own_loss=task.loss_fn is None, parts=parts, is_chosen=is_chosen)
        if self.compression is not None:
            refuse(built, f"{self.config.backend} with a codec", CANNOT_SEND)

    @property
    def _checked_batch(self) -> BatchPlan:
        """The batch for which models and losses are checked."""
        return most_divided(self._batch) if self.config.chooses_batch else self._batch

    @classmethod
    def cannot_train(cls, plan: RunPlan) -> dict[Trait, str]:
        """Traits of parameters that ranks of `plan` cannot train, and why."""
        return {}

    @classmethod
    def check_model(cls, model: nn.Module, plan: RunPlan) -> None:
        """Refuse a model that ranks of `plan` would refuse, before they start.

        Raises:
            UserError: a layer or parameter of it cannot be trained so.
        """
        refuse(model, plan.spec.name, cls.cannot_train(plan))
        check_micro_batches(model, plan.spec.name, plan.world_size, plan.batch, (1, plan.dims.context))

    def build(self, model: Any) -> nn.Module:
        """The user's module, or what the user's factory builds; the same weights on every rank,
        unless `place` sees to that."""
        return build_model(model, self.config.seed)

    def place(self, model: nn.Module) -> nn.Module:
        """Move, shard or cut the model, before the optimizer is built. All names must stay:
        what this rank does not hold (see `held`) goes to the meta device."""
        refuse(model, self.config.backend, {META: "it has no values"})
        self.apply_levers(model)
        return model.to(self.world.device)

    def wrap(self, step: StepModule) -> Callable[..., Any]:
        """Surround the step with what makes ranks cooperate. Alone there is nothing."""
        return step

    def _declare_counts(self, task: Task) -> None:
        tensors = getattr(task.train_data, "tensors", None)
        if tensors is not None and len(tensors) > 1:
            self.objective.declare_unmasked(tensors[-1])

    # -- one step --------------------------------------------------------------------

    def run_window(self, window: Window) -> tuple[Any, Any]:
        self._check_trainable()
        self._window = window
        self.objective.begin_window()
        if self.placeholders == "computed":
            window = with_stand_ins(window)
        watch = self._watch
        first = watch.before(window) if watch is not None else None
        counted, known = self.objective.counted, self.known_counts(window)
        scale = self._gradient_share / window.num_samples
        if counted and self.num_contributors == 1 and None not in known:
            scale, counted = 1.0 / sum(known), False  # type: ignore[arg-type]
        total, count = self.run_micro_batches(window, scale, known)
        self._count, self._num_samples = count if counted else None, window.num_samples
        self.last_batch.end()
        if watch is not None and first is not None:
            watch.check(first, window)
        self._window_loss = total, count
        return total, count

    def run_micro_batches(
        self, window: Window, scale: float, known: Sequence[float | None]
    ) -> tuple[Any, Any]:
        """Forward and backward of each micro-batch: (sum of losses, count) of this rank.

        Args:
            scale: what sums of losses are multiplied by.
            known: count of each micro-batch, where it is known before.
        """
        micro_batches = window.micro_batches
        total: Any = None
        count: Any = None
        hooked, last, skips = bool(self._hooks), len(micro_batches) - 1, self.placeholders != "computed"
        for position, (batch, num_samples) in enumerate(micro_batches):
            if position:
                self.timers.enter("forward")
            self.last_batch.begin(num_samples)
            kept = None if num_samples or skips else Untouched(self.module)
            context, args = self.sync_when(position == last), (batch, num_samples, scale, known[position])
            if context is NO_CONTEXT and not hooked:
                part, number = self._forward_and_backward(*args)
            else:
                with self._hooks.held_back(), context:
                    part, number = self._forward_and_backward(*args)
            if kept is not None:
                kept.restore()
            total = part if total is None else total + part
            count = number if count is None else count + number
        return total, count

    def _forward_and_backward(
        self, batch: Any, num_samples: int, scale: float, known: float | None
    ) -> tuple[Any, Any]:
        """(sum of losses, count) of a micro-batch."""
        timers, start = self.timers, perf_counter()
        context, args = self.autocast(), (self.to_device(batch), num_samples, scale, known)
        if context is NO_CONTEXT:
            loss, total, count = self.model(*args)
        else:
            with context:
                loss, total, count = self.model(*args)
        middle = perf_counter()
        timers.enter("backward")
        if num_samples or loss.requires_grad:
            self.backward_explained(loss)
        timers.add("forward", middle - start)
        timers.add("backward", perf_counter() - middle)
        return total, count

    def through(self, kind: str, function: Callable[[], Any]) -> Any:
        """Call a function that uses the model.

        Args:
            kind: of forward pass, in each of which a rank calls the same modules.
        """
        return function()

    @property
    def num_contributors(self) -> int:
        """Number of ranks whose losses, counts and gradients add up to those of a global batch."""
        return self.world.data_parallel_size

    @property
    def cut_into(self) -> tuple[int, int]:
        """Numbers of pieces of a micro-batch and of slices of a sequence that are computed by themselves."""
        return 1, 1

    @property
    def placeholders(self) -> str:
        """Part of a micro-batch without samples in a step: ``computed``, where its forward pass has
        collectives; ``zeros`` are its gradients, where only those are exchanged; ``skipped``."""
        return "computed" if self.world.size > 1 else "skipped"

    @property
    def _gradient_share(self) -> int:
        """What a rank's gradient is divided by when it is reduced."""
        return 1 if self.sums_gradients else self.world.data_parallel_size

    def known_counts(self, window: Window) -> list[float | None]:
        """Counts of this rank's micro-batches: of their samples, or of what their targets determine. One
        without an unmasked token is left to the general way, which takes no mean."""
        if not self.objective.counted:
            return [n for _, n in window.micro_batches]
        known_count = self.objective.known_count
        return [known_count(batch) or None if n else None for batch, n in window.micro_batches]

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        start = perf_counter()
        norm, refused = self.settle_gradients(max_norm, want_norm)
        skipped = refused or self.take_step(partial(self.settle_gradients, max_norm))
        self.clear_gradients()
        self._window = None
        if self.compression is not None:
            self.compression.settle(skipped)
        self.timers.add("optimizer", perf_counter() - start)
        return StepResult(norm, skipped)

    def settle_gradients(self, max_norm: float | None, want_norm: bool = False) -> tuple[Tensor | None, bool]:
        """Unscale, count, call hooks and clip: (norm if it was computed, whether to skip the step)."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            self.share_overflow()
        ratio = self._count_ratio()
        if self._hooks:
            self._rescale(ratio, None, None)
            ratio = None
            self._hooks.run()
        check = self.config.on_nan == "skip" and self.scaler is None
        norm = None
        if max_norm is not None or want_norm or check:
            norm = self.gradient_norm()
            norm = norm if ratio is None else norm * ratio
        self._rescale(ratio, norm, max_norm)
        return norm, check and norm is not None and not math.isfinite(float(norm))

    def add_count(self, count: Any) -> None:
        """Add up one window's count of tokens before its gradients. Collective."""
        self._count = self.all_reduce([float(count)])[0]

    def count_first(self) -> None:
        """With a codec: make this rank's gradients those of the mean over the true count, before they are
        sent. What is kept of them is added to gradients of another count. Collective."""
        if self.compression is None or self._count is None:
            return
        self.add_count(self._count)
        self._rescale(self._count_ratio(), None, None)
        self._count = None

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the unscaled gradient. Sharded backends reduce it over ranks."""
        return nn.utils.get_total_norm(self.gradients())

    def gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients that the optimizer will use, live; of a sparse one its
        elements."""
        found = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                parameter.grad = gradient = gradient.coalesce()
                gradient = gradient._values()  # `values` would be detached from the gradient
            if gradient is not None:
                found.append(gradient)
        return found

    def share_overflow(self) -> None:
        """Under fp16: share one rank's overflow, so that all ranks skip (C8). Only
        ranks that hold different gradients have an overflow to share."""

    def clear_gradients(self) -> None:
        """Forget this step's gradients, that of the count included."""
        if type(self.optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            # What it does, without its record for profilers, which costs as much as a small layer.
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=True)
        if self.step_module.reduced_count:
            self.step_module.count.grad = None

    def _count_ratio(self) -> Any:
        """What gradients have to be multiplied by because the loss was divided by the number of samples, and
        not by the true count, which was not known; None for 1. On a GPU it stays there."""
        if self._count is None:
            return None
        total = self._total_count()
        if not isinstance(total, Tensor):
            return None if total == self._num_samples else inverse(total / self._num_samples)
        return inverse(total.to(self.world.device, torch.float64) / self._num_samples)

    def _total_count(self) -> Any:
        """The count of the whole global batch; a number if it is on the CPU."""
        if not self.step_module.reduced_count:
            return on_host(self._count)
        total = on_host(self.step_module.count.grad)
        return total if self.scaler is None else total / on_host(self.scaler._get_scale_async())

    def _rescale(self, ratio: Tensor | float | None, norm: Tensor | None, max_norm: float | None) -> None:
        """Fold the count's ratio and the clipping into one pass over the gradients (C6)."""
        factor = scale_factor(ratio, norm, max_norm)
        if factor is not None:
            multiply_in_place(self.gradients(), factor)

    # -- evaluation ------------------------------------------------------------------

    def set_training(self, training: bool) -> None:
        """Enter evaluation mode, or return to the modes before it: see `ModuleModes`."""
        self._modes.set_training(self.module, training)
        self.switch_optimizer(training)

    def to_device(self, batch: Any) -> Any:
        """`batch` with its tensors on this rank's device."""
        if self.world.device == "cpu":
            return batch
        if self._transfers is None:
            self._transfers = Transfers(self.world.device)
        return self._transfers.take(batch)

    @property
    def loads_ahead(self) -> bool:
        return self.world.device != "cpu" and self.config.data.prefetch_to_device

    def load_ahead(self, window: Window) -> None:
        if self._transfers is None:
            self._transfers = Transfers(self.world.device)
        self._transfers.forget()
        for batch, _ in window.micro_batches:
            self._transfers.begin(batch)

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        return self.evaluated(read_only(nullcontext(self.module)))

    def settings(self) -> Settings:
        return Settings(self)

    def free_gathered(self) -> None:
        """Free copies of parameters that were gathered for a forward pass, where there are any."""

    def held_weights(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def callback_scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def release(self) -> None:
        self._transfers = None
        self.undo_levers()

    def teardown(self) -> None:
        self.undo_levers()  # a run that failed was not released
