"""Layouts that are wrong by one line each; the oracle of test_memory.py has to notice each of them."""

from __future__ import annotations

from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.model_facts import ParameterFacts
from distributed.planner.estimates.replicated_layout import Buckets
from distributed.planner.estimates.sharded_layout import ShardedUnits
from distributed.planner.estimates.zero_layout import ZeroStages

__all__ = ["MUTANTS"]


class ForgetsOptimizerWorkspace(Layout):
    """The temporary memory of the update is not counted."""

    def update(self, tensors: list[int]) -> None:
        return None


class KeepsActivations(Layout):
    """Nothing of a micro-batch is freed before its end."""

    def free(self, tensor: int) -> None:
        return None


class ForgetsBuckets(Buckets):
    """Gradients are reduced where they are."""

    def place(self) -> None:
        Layout.place(self)


class CopiesGradients(Buckets):
    """Gradients stay beside their buckets, as without gradient_as_bucket_view."""

    def gradient(self, parameter: int) -> None:
        Layout.gradient(self, parameter)


class GathersWithoutStaging(ShardedUnits):
    """All-gathers write into the parameters."""

    def _stage(self, unit: int) -> None:
        return None


class KeepsGathered(ShardedUnits):
    """Blocks stay gathered between forward and backward."""

    def leave_forward(self, block: int) -> None:
        self._order.append(block)


class ReducesInPlace(ShardedUnits):
    """The input of a reduce-scatter is not a copy."""

    def _reduce(self, unit: int) -> None:
        self._reshard(unit)


class KeepsWholeParameters(ShardedUnits):
    """Every rank keeps the whole model."""

    def held(self, parameter: ParameterFacts) -> int:
        return parameter.nbytes


class ForgetsMasters(ZeroStages):
    """The optimizer updates the flat tensor itself."""

    def place(self) -> None:
        super().place()
        if self.stage:
            self.ledger.give("optimizer", self._share)


class ReducesWithoutFlattening(ZeroStages):
    """A bucket is reduced where it is."""

    def _reduce(self) -> None:
        self._filled = 0


class KeepsOwnedGradients(ZeroStages):
    """The gradients that a rank owns stay beside their flat copy."""

    def step(self) -> None:
        self.ledger.take("gradients", self._owned)
        super().step()


MUTANTS: tuple[tuple[str, type[Layout]], ...] = (
    ("serial", ForgetsOptimizerWorkspace),
    ("serial", KeepsActivations),
    ("pytorch-ddp", ForgetsBuckets),
    ("pytorch-ddp", CopiesGradients),
    ("fsdp", GathersWithoutStaging),
    ("fsdp", KeepsGathered),
    ("fsdp", ReducesInPlace),
    ("fsdp", KeepsWholeParameters),
    ("deepspeed", ForgetsMasters),
    ("deepspeed", ReducesWithoutFlattening),
    ("deepspeed", KeepsOwnedGradients),
)
"""(backend, its wrong layout)."""
