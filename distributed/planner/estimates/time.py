"""Time of an optimizer step by part, for a model given by numbers. See docs/predicted-time.md for its error.

Sources: Narayanan et al., 2021 (arXiv:2104.04473), for the bubble of a pipeline; Rajbhandari et al., 2020
(arXiv:1910.02054), for the traffic of ZeRO; Qi et al., 2024 (arXiv:2401.10241), for schedules that split
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from distributed.planner.estimates.block_time import (
    ITEM_SIZES,
    PassTime,
    block_time,
    output_time,
    send_time,
)
from distributed.planner.estimates.engine import OURS, Engine
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.links import Link, link_of
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.rank_share import rank_share
from distributed.planner.estimates.split import SGD_WITH_MOMENTUM, Split
from distributed.planner.pipeline import MEASURABLE, ZERO_BUBBLE

__all__ = ["StepTimer", "TimeParts"]

_OPTIMIZER_BYTES = {"adamw": 28, "adam": 28, "sgd": 12, SGD_WITH_MOMENTUM: 20}
"""Optimizer -> bytes that a step reads and writes for an element, state in float32."""

_TOKEN_BYTES = 16
"""Bytes of a token on its way to the device: input and target, 64 bits each."""


@dataclass(frozen=True)
class TimeParts:
    """Seconds of an optimizer step of the slowest rank, by what it does.

    Attributes:
        compute: forward, backward and recomputation, as the mean over the stages.
        exposed_communication: collectives and messages that no computation hides.
        bubble: waiting for other stages: the ends of the pipeline, and stages of unequal time.
        data: copies of the samples to the device. Reading and preparing them is not predicted.
        optimizer: the update of the weights.
    """

    compute: float
    exposed_communication: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def interval(self, spread: float) -> tuple[float, float]:
        """Lower and upper end of ``total`` with the relative half-width `spread`."""
        return self.total / (1.0 + spread), self.total * (1.0 + spread)


@dataclass(frozen=True)
class StepTimer:
    """Predicts steps of one model on one kind of hardware.

    Attributes:
        numbers: sizes of the model and its batch.
        profile: the hardware.
        engine: the program that trains.
        codec_share: ``(codec, ranks) ->`` bytes that the codec sends, relative to gradients that are sent as
            they are.
    """

    numbers: ModelNumbers
    profile: HardwareProfile
    engine: Engine = OURS
    codec_share: Callable[[str, int], float] = lambda codec, ranks: 1.0

    def parts(self, split: Split) -> TimeParts:
        """Time of a step under `split`."""
        block = block_time(self.numbers, split, self.profile, self.engine)
        output = output_time(self.numbers, split, self.profile)
        sends = self.engine.sends_exposed * send_time(self.numbers, split, self.profile)
        micro, bubble = self._pipeline(split, block, output, sends)
        count = split.num_micro_batches
        exposed = count * (micro.exposed + self._chunks(split) * sends)
        exposed += self._beside(split, micro) + self._updates(split)
        tokens = count * split.micro_batch * self.numbers.sequence / split.dims.context
        data = tokens * _TOKEN_BYTES / self.profile.host_link
        return TimeParts(count * micro.compute, exposed, bubble, data, self._optimizer(split))

    def mfu(self, split: Split, seconds: float) -> float:
        """Model FLOP/s of a step of `seconds` as a share of the peak of all devices.

        Recomputation is not counted, and attention without a causal saving (Chowdhery et al., 2022).
        """
        peak = self.profile.peak_of(split.dims.world_size, split.precision)
        return self.numbers.step_flops / (seconds * peak)

    def _beside(self, split: Split, micro: PassTime) -> float:
        """Exposed part of gathers, which run beside all computation, and of reductions, beside backward."""
        rounds, overlap = self._rounds(split), self.engine.overlap
        reductions = rounds * self._gradients(split)
        both = reductions + self._gathers(split)
        backward, compute = rounds * micro.backward, split.num_micro_batches * micro.compute
        return max(0.0, reductions - overlap * backward, both - overlap * compute)

    def _pipeline(
        self, split: Split, block: PassTime, output: PassTime, sends: float
    ) -> tuple[PassTime, float]:
        """Mean time of a stage for a micro-batch, and seconds of a step in which ranks wait."""
        stages, layers, count = split.dims.pipeline, self.numbers.layers, split.num_micro_batches
        mean = layers / stages
        micro = PassTime(
            mean * block.forward + output.forward / stages,
            mean * block.backward + output.backward / stages,
            mean * block.exposed,
        )
        if stages == 1:
            return micro, 0.0
        block_seconds = block.compute + block.exposed
        most = -(-layers // stages)
        # Where stages differ by a block, the last one has fewer: it has the output layer as well.
        last = (most - (most * stages > layers)) * block_seconds + output.compute
        slowest = max(most * block_seconds, last)
        average = micro.compute + micro.exposed
        # A micro-batch passes all stages in both directions; gradients of weights are off that path if split.
        splits = split.schedule in ZERO_BUBBLE
        path = stages * average * (2 / 3 if splits else 1.0)
        ends = (stages - 1) * average / (self._chunks(split) * (3 if splits else 1))
        ends = max(ends, path - count * average) + (stages - 1) * sends
        return micro, ends + count * (slowest - average)

    def _chunks(self, split: Split) -> int:
        return 1 if split.schedule in MEASURABLE else self.engine.stages_per_rank

    def _gathers(self, split: Split) -> float:
        """All-gathers of sharded parameters in a step: before forward and before backward."""
        dims = split.dims
        if dims.shard == 1 and split.zero_stage < 3:
            return 0.0
        size = self.engine.gathered_bytes or ITEM_SIZES[split.precision]
        nbytes = rank_share(self.numbers, split, self.engine).whole * size
        axis = "shard" if dims.shard > 1 else "data"
        link = link_of(self.profile, dims, axis)
        return 2.0 * split.num_micro_batches * link.seconds("all-gather", nbytes)

    def _rounds(self, split: Split) -> int:
        """How often gradients are reduced in a step: ZeRO 2 and 3 keep none for the next micro-batch."""
        return split.num_micro_batches if split.zero_stage > 1 else 1

    def _gradients(self, split: Split) -> float:
        """One reduction of the gradients."""
        dims, size = split.dims, self.engine.gradient_bytes
        share = rank_share(self.numbers, split, self.engine)
        nbytes = share.whole * size
        if split.zero_stage:
            return link_of(self.profile, dims, "data").seconds("reduce-scatter", nbytes)
        context = link_of(self.profile, dims, "context").seconds("all-reduce", nbytes / dims.shard)
        if dims.shard > 1:
            scattered = link_of(self.profile, dims, "shard").seconds("reduce-scatter", nbytes)
            copies = link_of(self.profile, dims, "data")
            return scattered + self._summed(split, copies, nbytes / dims.shard) + context
        seconds = context + self._summed(split, link_of(self.profile, dims, "data"), share.others * size)
        if share.experts:
            copies = link_of(self.profile, dims, "data", size=dims.expert_data, step=dims.expert)
            seconds += self._summed(split, copies, share.experts * size)
        return seconds

    def _summed(self, split: Split, link: Link, nbytes: float) -> float:
        return link.seconds("all-reduce", nbytes * self.codec_share(split.codec, link.size))

    def _updates(self, split: Split) -> float:
        """Collectives behind the optimizer, and of weights that two stages share."""
        dims, seconds = split.dims, 0.0
        if split.zero_stage in (1, 2):
            nbytes = rank_share(self.numbers, split, self.engine).whole * self.engine.weight_bytes
            seconds += link_of(self.profile, dims, "data").seconds("all-gather", nbytes)
        if self.numbers.tied and dims.pipeline > 1:
            shared = self.numbers.vocabulary * self.numbers.hidden / dims.tensor
            link = link_of(self.profile, dims, "pipeline", size=2)
            seconds += link.seconds("all-reduce", shared * self.engine.gradient_bytes)
        return seconds

    def _optimizer(self, split: Split) -> float:
        elements = rank_share(self.numbers, split, self.engine).held(split, 1)
        traffic = _OPTIMIZER_BYTES[split.optimizer]
        if split.offload:
            copies = self.engine.gradient_bytes + self.engine.weight_bytes
            return elements * (traffic + copies) / self.profile.host_link
        return elements * traffic / (self.profile.memory_bandwidth * self.profile.achievable.memory)
