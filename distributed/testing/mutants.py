"""Deliberately broken backends: each breaks one contract, and its test must turn red.

They prove that the kit can fail. A backend author can read in them what the kit catches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.interfaces.backend import BackendSpec, MicroBatch, StepResult, Window, World
from distributed.plan import RunPlan
from distributed.plugin_manager import Catalog
from distributed.process_group import ProcessGroupBackend
from distributed.torch_backend import StepModule

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
            parameter.grad *= self.world.size + 1
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


@dataclass(frozen=True)
class Mutant:
    """A broken backend and the test that is meant to catch it.

    Attributes:
        kind: the backend's class.
        caught_by: name of the conformance test.
        arguments: the test's parameters.
    """

    kind: type[Any]
    caught_by: str
    arguments: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return f"mutant-{self.kind.__name__}"


_PARITY = "test_c2_c3_parity_with_the_oracle"

MUTANTS = [
    Mutant(NeedsTheWholeBatch, "test_c1_global_batch_is_kept_on_any_number_of_ranks"),
    Mutant(SumsGradients, _PARITY, (1, 24)),
    Mutant(AveragesMicroBatches, _PARITY, (2, 13)),
    Mutant(ForgetsToReduce, _PARITY, (1, 24)),
    Mutant(RoundsToHalf, "test_c2_parity_in_float32", ("sgd", 1e-6)),
    Mutant(IgnoresTheTrueCount, "test_c2_masked_tokens_weigh_alike", (2,)),
    Mutant(DropsSamples, "test_c3_every_sample_is_used_once_an_epoch"),
    Mutant(RepeatsTheFirstSlice, "test_c3_every_sample_is_used_once_an_epoch"),
    Mutant(LosesMomentum, "test_c4_a_second_fit_continues_at_the_exact_sample"),
    Mutant(EvaluatesStandIns, "test_c5_every_validation_sample_counts_once"),
    Mutant(ForgetsOtherRanksInEvaluation, "test_c5_every_validation_sample_counts_once"),
    Mutant(ClipsLocally, "test_c6_clips_the_whole_gradient_once"),
    Mutant(ClipsEveryMicroBatch, "test_c6_clips_the_whole_gradient_once"),
    Mutant(StepsTheScheduleTwice, "test_c7_schedules_count_optimizer_steps"),
    Mutant(StopsAlone, "test_c8_one_ranks_wish_to_stop_stops_all"),
]
"""Every mutant with its test."""


def mutant_spec(mutant: Mutant, catalog: Catalog) -> BackendSpec:
    """The mutant as a backend like any other; ``pytorch-ddp`` says what it claims to do."""
    return replace(
        catalog.backend("pytorch-ddp"),
        name=mutant.name,
        target=f"{mutant.kind.__module__}:{mutant.kind.__name__}",
    )
