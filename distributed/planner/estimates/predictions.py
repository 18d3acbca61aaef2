"""What a search asks about the splits of a model: time, memory, bounds."""

from __future__ import annotations

from typing import Protocol

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import TimeParts

__all__ = ["ModelSizes", "Predictions"]


class ModelSizes(Protocol):
    """Sizes of a model and of its batch that a split has to divide."""

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""

    @property
    def layers(self) -> int:
        """Blocks, which are the most stages that a pipeline can have."""

    @property
    def experts(self) -> int:
        """Experts of a block; 1 without a mixture."""

    def with_batch(self, global_batch: int) -> ModelSizes:
        """The same model with another batch."""

    def indivisible(self, dims: ParallelDims) -> str | None:
        """Why ranks cannot divide the model so, as far as its sizes show it; None if they can."""


class Predictions(Protocol):
    """Predictions of one model on one kind of hardware."""

    def time(self, split: Split) -> TimeParts:
        """Seconds of a step, by part.

        Raises:
            UserError: the model cannot be divided so, or the time of such a split is not predicted.
        """

    def memory(self, split: Split) -> MemoryParts:
        """Bytes of the rank that needs most, by part.

        Raises:
            UserError: the model cannot be divided so, or the memory of such a split is not predicted.
        """

    def memory_bound(self, split: Split) -> float:
        """Bytes that the rank needs at least, which is quickly found."""

    def mfu(self, split: Split, seconds: float) -> float:
        """Model FLOP/s of a step of `seconds`, as a share of the peak of all devices."""

    def bound(self, dims: ParallelDims, share: int, precision: str) -> float:
        """Seconds that no split with these ranks goes below.

        Args:
            share: samples of a step for each rank that has different samples.
        """

    def least_weights(self) -> float:
        """Bytes that all devices together need at least, whatever the split."""
