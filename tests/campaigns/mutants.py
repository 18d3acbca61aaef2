"""Deliberately broken backends: each breaks one contract, and its test must turn red.

They prove that the kit can fail. A backend author can read in them what the kit catches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distributed.communication.broadcast import broadcast_values
from distributed.interfaces.backend import MicroBatch, StepResult, Window
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState
from distributed.interfaces.task import Task
from distributed.training.blocks import find_blocks
from distributed.training.mean_losses import MeanLosses
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.torch_backend import StepModule

__all__ = ["Sound"]


class Sound(ProcessGroupBackend):
    """Not broken: the least that keeps the contracts. The mutants differ from it by a line."""

    follows_requires_grad = False

    def wrap(self, step: StepModule) -> nn.Module:
        if self.world.size == 1:
            return step
        broadcast_values([*step.parameters(), *step.buffers()])
        options: dict[str, Any] = {"init_sync": False, "forward_sync_buffers": False}
        return DistributedDataParallel(step, find_unused_parameters=True, **options)

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if not training and self.world.size > 1:
            broadcast_values(self.module.buffers())


class DropsSamples(Sound):
    """C3: leaves the last sample of every full micro-batch out."""

    def to_device(self, batch: Any) -> Any:
        return [part[:-1] if len(part) == self._batch.batch_size else part for part in batch]


class RepeatsTheFirstSlice(Sound):
    """C3: every rank takes rank 0's slice of each global batch."""

    def setup(self, plan: RunPlan) -> World:
        world: World = super().setup(plan)
        self.world = replace(world, data_parallel_rank=0)
        return self.world


class SumsGradients(Sound):
    """C2: forgets that reduction averages over ranks and multiplies by their number."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self._parameters:
            parameter.grad *= self.world.size
        return super().optimizer_step(max_norm, want_norm)


class AveragesTwice(Sound):
    """C2: divides gradients by the number of ranks, which reduction has done already."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self._parameters:
            parameter.grad /= self.world.size
        return super().optimizer_step(max_norm, want_norm)


class AveragesMicroBatches(Sound):
    """C2: gives every micro-batch the same weight, whatever its number of samples (the usual mistake)."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        real = [MicroBatch(batch, self._batch.batch_size) for batch, _ in window.micro_batches]
        return super().run_window(Window(real, len(real) * self._batch.batch_size * self.world.size))


class IgnoresTheTrueCount(Sound):
    """C2: divides by the nominal batch although tokens are masked."""

    def _count_ratio(self) -> Tensor | None:
        return None


class _KnowsNoMean(MeanLosses):
    def of(self, loss: Tensor) -> None:
        return None


class WeighsMeansBySamples(Sound):
    """C2: weighs the mean that a model returns by samples, whatever it averages over."""

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        self.objective._means = _KnowsNoMean()


class ForgetsToReduce(Sound):
    """C2: ranks never exchange gradients."""

    def wrap(self, step: StepModule) -> nn.Module:
        return step


class ClipsLocally(Sound):
    """C6: clips every parameter's gradient by itself instead of the whole model's."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self._parameters:
            nn.utils.clip_grad_norm_([parameter], max_norm or float("inf"))
        return super().optimizer_step(None, want_norm)


class ClipsEveryMicroBatch(Sound):
    """C6: clips what has accumulated after each micro-batch."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.config.gradient_clipping:
            nn.utils.clip_grad_norm_(self._parameters, self.config.gradient_clipping)


class EvaluatesStandIns(Sound):
    """C5: counts the samples that pad a ragged last batch."""

    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        padded = [MicroBatch(batch, max(number, 1)) for batch, number in window.micro_batches]
        return super().evaluate_window(Window(padded, window.num_samples))


class ForgetsOtherRanksInEvaluation(Sound):
    """C5: reports rank 0's own validation figures."""

    def all_reduce(self, values: Any) -> list[float]:
        own = list(values)
        reduced: list[float] = super().all_reduce(values)
        return reduced if self.module.training else [reduced[0], *own[1:]]


class StopsAlone(Sound):
    """C8: a rank's request to stop is not reduced over the ranks."""

    def all_reduce(self, values: Any) -> list[float]:
        own = list(values)
        reduced: list[float] = super().all_reduce(values)
        return [*reduced[:-1], own[-1]] if self.world.rank == 0 else reduced

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


class LosesMomentum(Sound):
    """C4: a second fit starts with a fresh optimizer."""

    def import_state(self, reader: Any) -> None:
        super().import_state(reader)
        self.optimizer.state.clear()


class StepsTheScheduleTwice(Sound):
    """C7: the learning rate moves once more per step, as schedulers wrapped per rank do."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        result = super().optimizer_step(max_norm, want_norm)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
        return result


class NeedsTheWholeBatch(Sound):
    """C1: shrinks the batch to what fits, silently."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        first = window.micro_batches[:1]
        return super().run_window(Window(first, window.num_samples))


class RoundsToHalf(Sound):
    """C2: reduces gradients in half precision without being asked."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self._parameters:
            parameter.grad.copy_(parameter.grad.to(torch.bfloat16))
        return super().optimizer_step(max_norm, want_norm)


class PadsTheLastBatch(Sound):
    """C3: repeats samples until every rank's last micro-batch is full, as padded samplers do."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        size = self._batch.batch_size
        full = [
            MicroBatch([part[torch.arange(size) % len(part)] for part in batch], size)
            for batch, _ in window.micro_batches
        ]
        return super().run_window(Window(full, len(full) * size * self.world.size))


class DropsTheRaggedBatch(Sound):
    """C3: leaves an epoch's last, smaller global batch out without being asked."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        self._ragged = window.num_samples < self._batch.global_batch_size
        return super().run_window(window)

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        if self._ragged:
            self.clear_gradients()
        return super().optimizer_step(max_norm, want_norm)


class DividesByAccumulationTwice(Sound):
    """C2: the loss is divided by the accumulation steps, and what arrives already was."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self._batch.gradient_accumulation_steps)


class SkipsTheLastSync(Sound):
    """C2: holds gradients back in the last micro-batch of a window and sends them in the others."""

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        return super().sync_when(not last)


class ReportsOneRanksLoss(Sound):
    """C2: trains on all ranks' samples and reports the loss of rank 0's."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        loss, count = super().run_window(window)
        return (loss, count) if self.world.rank == 0 else (0 * loss, 0 * count)


class ClipsBeforeReduction(Sound):
    """C6: every rank clips its own gradient, and the clipped ones are averaged."""

    def wrap(self, step: StepModule) -> nn.Module:
        return step

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, max_norm)
        for gradient in [p.grad for p in self.step_module.parameters() if p.grad is not None]:
            dist.all_reduce(gradient)
            gradient /= self.world.size
        return super().optimizer_step(None, want_norm)


class ClipsScaledGradients(Sound):
    """C6: clips before the loss scale is taken out, so that fp16 gradients all but vanish."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        if self.scaler is not None and max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, max_norm)
        return super().optimizer_step(max_norm, want_norm)


class ZeroesWhatIsNotFinite(Sound):
    """C6: replaces NaN in gradients by zero and takes the step that should be skipped."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self._parameters:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().optimizer_step(max_norm, want_norm)


class ValidatesRankMeans(Sound):
    """C5: averages the ranks' validation means, however many samples each holds."""

    def all_reduce(self, values: Any) -> list[float]:
        own = list(values)
        if not self.module.training:
            pairs = zip(own[1::2], own[2::2], strict=True)
            own = [own[0], *(part for total, count in pairs for part in (total / max(count, 1), 1.0))]
        return list(super().all_reduce(own))


class EvaluatesInFloat32(Sound):
    """C5: reduces validation sums in float32, which cannot count beyond 2**24."""

    def all_reduce(self, values: Any) -> list[float]:
        if self.module.training:
            return list(super().all_reduce(values))
        rounded = torch.tensor(list(values), dtype=torch.float32)
        dist.all_reduce(rounded)
        return [float(value) for value in rounded]


class ResumesAtTheEpochsStart(Sound):
    """C4: a second fit begins the epoch again instead of going on at its next sample."""

    def import_state(self, reader: Any) -> None:
        super().import_state(reader)
        reader.extra["progress"]["samples"] = 0


class StepsTheSchedulePerMicroBatch(Sound):
    """C7: the learning rate moves with every micro-batch instead of every step."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        result = super().optimizer_step(max_norm, want_norm)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 ** (self._batch.gradient_accumulation_steps - 1)
        return result


class ScalesTheRateByRanks(Sound):
    """C7: multiplies the learning rate by the number of ranks, unasked."""

    def adopt(self, plan: RunPlan) -> None:
        super().adopt(plan)
        self._learning_rate *= plan.world_size


class SavesOneRanksShare(Sound):
    """C9: rank 0 alone exports its share of the state."""

    def export_state(self) -> BackendState:
        state: BackendState = super().export_state()
        return state if self.world.rank == 0 else replace(state, chunks=[])


class RoundsWhatItLoads(Sound):
    """C9: optimizer state comes back by way of a narrower type."""

    def import_state(self, reader: Any) -> None:
        super().import_state(reader)
        for value in [value for state in self.optimizer.state.values() for value in state.values()]:
            value.copy_(value.float())


class DrawsWhenTrainingBegins(Sound):
    """C10: draws a random number when an epoch begins, and one more where a run goes on within it."""

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        torch.rand(())


class ComputesInFullPrecision(Sound):
    """claims: says that it can compute in half precision, and does not."""

    def setup_precision(self, precision: str, *others: Any) -> None:
        super().setup_precision("fp32", *others)


class RecomputesAnew(Sound):
    """claims: recomputes the activations of blocks with other random numbers than in the forward pass"""

    def apply_levers(self, model: nn.Module) -> None:
        if self.config.activation_checkpointing == "none":
            return
        for block in find_blocks(model, ()):
            options = {"use_reentrant": False, "preserve_rng_state": False}
            block.forward = partial(checkpoint, block.forward, **options)


class RecomputesNothing(Sound):
    """claims: says that it recomputes activations, and stores them"""

    def apply_levers(self, model: nn.Module) -> None:
        return None


class NarrowsWhatItCompiles(Sound):
    """claims: computes compiled blocks in float32"""

    def apply_levers(self, model: nn.Module) -> None:
        for block in find_blocks(model, ()) if self.config.compile != "none" else ():
            block.forward = torch.compile(partial(_narrow, block.forward), backend="eager")


def _narrow(forward: Any, x: Tensor) -> Tensor:
    out: Tensor = forward(x.float().double())
    return out.float().double()
