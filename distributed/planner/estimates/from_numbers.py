"""FromNumbers: predictions for a transformer that is given by its sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distributed.interfaces.codec import CodecSpec
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.block_time import block_time, output_time
from distributed.planner.estimates.codec_shares import codec_share
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.memory_by_numbers import rank_memory
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer, TimeParts

__all__ = ["FromNumbers"]

_ROUNDING = 1e-9
"""Relative difference that the order of additions can make between a bound and a time."""

_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class FromNumbers:
    """See `distributed.planner.estimates.predictions.Predictions`.

    Attributes:
        numbers: the model and its batch.
        profile: the hardware.
        codecs: name -> gradient codec.
    """

    numbers: ModelNumbers
    profile: HardwareProfile
    codecs: Mapping[str, CodecSpec] = field(default_factory=dict)

    def time(self, split: Split) -> TimeParts:
        """Seconds of a step, by part."""
        return self.timer.parts(split)

    def memory(self, split: Split) -> MemoryParts:
        """Bytes of the rank that needs most, by part."""
        return rank_memory(self.numbers, split, self.profile)

    def memory_bound(self, split: Split) -> float:
        """Bytes of the rank: they are quickly found."""
        return self.memory(split).total

    def mfu(self, split: Split, seconds: float) -> float:
        """Share of the peak of all devices."""
        return self.timer.mfu(split, seconds)

    def bound(self, dims: ParallelDims, share: int, precision: str) -> float:
        """Seconds that no split with these ranks goes below.

        A larger micro-batch never raises the time of a token, so that two parts bound the rest: computation
        and collectives of the blocks at the largest micro-batch and without recomputation; the ends of the
        pipeline at a micro-batch of one sample.
        """
        seconds = self._stage_time(dims, share, precision)
        if dims.pipeline > 1:
            chunks = 3 * self.timer.engine.stages_per_rank
            seconds += (dims.pipeline - 1) * self._stage_time(dims, 1, precision) / chunks
        return seconds * (1.0 - _ROUNDING)

    def least_weights(self) -> float:
        """Bytes of the weights."""
        return _WEIGHT_BYTES * self.numbers.parameters

    @cached_property
    def timer(self) -> StepTimer:
        """The time model."""
        shape = (self.numbers.hidden, self.numbers.hidden)
        return StepTimer(self.numbers, self.profile, codec_share=codec_share(self.codecs, [shape]))

    def _stage_time(self, dims: ParallelDims, micro_batch: int, precision: str) -> float:
        """Mean seconds of a stage for one micro-batch, without recomputation."""
        split, timer = Split(dims, "", micro_batch=micro_batch, precision=precision), self.timer
        block = block_time(self.numbers, split, self.profile, timer.engine)
        output = output_time(self.numbers, split, self.profile)
        return (self.numbers.layers * (block.compute + block.exposed) + output.compute) / dims.pipeline
