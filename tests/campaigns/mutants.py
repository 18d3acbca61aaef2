"""Deliberately broken backends: each breaks one contract, and its test must turn red.

They prove that the kit can fail. A backend author can read in them what the kit catches.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.interfaces.backend import MicroBatch, StepResult, Window
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState
from distributed.registry.catalog import Catalog
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.torch_backend import StepModule

__all__ = ["MUTANTS", "Mutant", "Sound", "mutant_spec"]


class Sound(ProcessGroupBackend):
    """Not broken: the least that keeps the contracts. The mutants differ from it by a line."""

    def wrap(self, step: StepModule) -> nn.Module:
        return DistributedDataParallel(step) if self.world.size > 1 else step


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
    """C2: weighs every micro-batch alike, however many samples it holds (the usual mistake)."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        real = [MicroBatch(batch, self._batch.batch_size) for batch, _ in window.micro_batches]
        return super().run_window(Window(real, len(real) * self._batch.batch_size * self.world.size))


class IgnoresTheTrueCount(Sound):
    """C2: divides by the nominal batch although tokens are masked."""

    def _count_ratio(self) -> Tensor | None:
        return None


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
    """C8: a wish to stop reaches nobody else."""

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


@dataclass(frozen=True)
class Mutant:
    """A broken backend and the test that is meant to catch it.

    Attributes:
        kind: the backend's class.
        caught_by: name of the conformance test.
        arguments: the test's parameters by name.
    """

    kind: type[Any]
    caught_by: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return f"mutant-{self.kind.__name__}"


_PARITY = "test_c2_c3_parity_with_the_oracle"
_ONCE = "test_c3_every_sample_is_used_once_an_epoch"
_CLIPS = "test_c6_clips_the_whole_gradient_once"
_EVALUATES = "test_c5_every_validation_sample_counts_once"
_CONTINUES = "test_c4_a_second_fit_continues_at_the_exact_sample"
_SCHEDULES = "test_c7_schedules_count_optimizer_steps"
_PRECISION = "test_a_claimed_precision_is_used_and_stays_close"

MUTANTS = [
    Mutant(NeedsTheWholeBatch, "test_c1_global_batch_is_kept_on_any_number_of_ranks"),
    Mutant(SumsGradients, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(AveragesTwice, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(AveragesMicroBatches, _PARITY, {"accumulation": 2, "length": 13}),
    Mutant(ForgetsToReduce, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(DividesByAccumulationTwice, _PARITY, {"accumulation": 2, "length": 24}),
    Mutant(SkipsTheLastSync, _PARITY, {"accumulation": 2, "length": 24}),
    Mutant(ReportsOneRanksLoss, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(RoundsToHalf, "test_c2_parity_in_float32", {"kind": "sgd", "limit": 1e-6}),
    Mutant(IgnoresTheTrueCount, "test_c2_masked_tokens_weigh_alike", {"accumulation": 2}),
    Mutant(DropsSamples, _ONCE),
    Mutant(RepeatsTheFirstSlice, _ONCE),
    Mutant(PadsTheLastBatch, _PARITY, {"accumulation": 1, "length": 23}),
    Mutant(DropsTheRaggedBatch, _ONCE),
    Mutant(LosesMomentum, _CONTINUES),
    Mutant(ResumesAtTheEpochsStart, _CONTINUES),
    Mutant(EvaluatesStandIns, _EVALUATES),
    Mutant(ForgetsOtherRanksInEvaluation, _EVALUATES),
    Mutant(ValidatesRankMeans, _EVALUATES),
    Mutant(EvaluatesInFloat32, _EVALUATES),
    Mutant(ClipsLocally, _CLIPS),
    Mutant(ClipsEveryMicroBatch, _CLIPS),
    Mutant(ClipsBeforeReduction, _CLIPS),
    Mutant(ClipsScaledGradients, _PRECISION, {"precision": "fp16"}),
    Mutant(ZeroesWhatIsNotFinite, "test_c6_c7_a_step_that_is_not_finite_is_left_out_by_all"),
    Mutant(StepsTheScheduleTwice, _SCHEDULES),
    Mutant(StepsTheSchedulePerMicroBatch, _SCHEDULES),
    Mutant(ScalesTheRateByRanks, "test_c7_a_users_scheduler_steps_once_an_epoch"),
    Mutant(StopsAlone, "test_c8_one_ranks_wish_to_stop_stops_all"),
    Mutant(SavesOneRanksShare, "test_c9_checkpoints_resume_on_any_number_of_ranks"),
    Mutant(RoundsWhatItLoads, "test_c9_checkpoints_resume_on_any_number_of_ranks"),
    Mutant(DrawsWhenTrainingBegins, "test_c10_a_killed_run_ends_with_the_same_bits"),
    Mutant(ComputesInFullPrecision, _PRECISION, {"precision": "bf16"}),
]
"""Every mutant with its test."""


def mutant_spec(mutant: Mutant, catalog: Catalog) -> BackendSpec:
    """The mutant as a backend like any other; ``pytorch-ddp`` says what it claims to do."""
    return replace(
        catalog.backend("pytorch-ddp"),
        name=mutant.name,
        target=f"{mutant.kind.__module__}:{mutant.kind.__name__}",
    )
