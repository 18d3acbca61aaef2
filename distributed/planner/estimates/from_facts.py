"""FromFacts: predictions for a model object, by what was recorded of it under fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.facts_time import FactsTimer
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.memory import check_split, predict_memory
from distributed.planner.estimates.model_facts import Cut, FactsSource, ModelFacts
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import TimeParts

__all__ = ["FactsSizes", "FromFacts"]

_MARGIN = 0.99
"""Share of a bound that stays below what padding and rounding make of it."""


@dataclass(frozen=True)
class FactsSizes:
    """Sizes of a model object and its batch. Which ranks divide it is known when it is cut.

    Attributes:
        global_batch: samples of an optimizer step.
        layers: its blocks, which are the most stages that a pipeline can have.
        experts: experts of a block; 1 without a mixture.
    """

    global_batch: int
    layers: int
    experts: int = 1

    def with_batch(self, global_batch: int) -> FactsSizes:
        """The same model with another batch."""
        return replace(self, global_batch=global_batch)

    def divided(self) -> tuple[tuple[str, str, int], ...]:
        """Nothing that is known before the model is cut."""
        return ()


@dataclass(frozen=True)
class FromFacts:
    """See `distributed.planner.estimates.predictions.Predictions`.

    Attributes:
        source: facts of each cut of the model.
        timer: predicts times.
        device: how allocator and collectives of the device use memory.
    """

    source: FactsSource
    timer: FactsTimer
    device: DeviceMemory

    def time(self, split: Split) -> TimeParts:
        """Seconds of a step, by part."""
        check_split(split)  # before facts of parts of the model are recorded for it
        return self.timer.parts(split)

    def memory(self, split: Split) -> MemoryParts:
        """Bytes of the rank that needs most, by part."""
        return predict_memory(self.source, split, self.device)

    def memory_bound(self, split: Split) -> float:
        """Bytes of parameters, gradients and optimizer state, divided among all ranks that can."""
        facts, dims, stage = self._whole, split.dims, split.zero_stage
        model = dims.size("pipeline", "tensor", "shard") * dims.expert
        trained = sum(p.nbytes for p in facts.parameters if p.trained)
        shares = [model * (dims.data if stage >= least else 1) for least in (3, 2, 1)]
        state = 0.0 if split.offload else facts.optimizer.state
        return _MARGIN * trained * (1 / shares[0] + 1 / shares[1] + state / shares[2])

    def mfu(self, split: Split, seconds: float) -> float:
        """Share of the peak of all devices."""
        return self.timer.mfu(split, seconds)

    def bound(self, dims: ParallelDims, share: int, precision: str) -> float:
        """Seconds to compute one whole micro-batch, divided among the ranks that share the model."""
        whole = Split(ParallelDims(), "serial", micro_batch=share, precision=precision)
        compute = self.timer.parts(whole).compute
        return _MARGIN * compute / (dims.model_parallel_size * dims.expert)

    def least_weights(self) -> float:
        """Bytes of the parameters."""
        return float(sum(p.nbytes for p in self._whole.parameters))

    @property
    def _whole(self) -> ModelFacts:
        return self.source(Cut())
