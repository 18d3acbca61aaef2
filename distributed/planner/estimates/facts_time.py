"""Time of an optimizer step by part, for a model of any kind, from the operations that were counted in it.

Where `StepTimer` computes operations from the sizes of a transformer, this counts those of a recorded step
(`ModelFacts.work`). Both have the same parts, the same hardware profiles, and the same formulas for the ends
of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.engine import OURS, Engine
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.links import link_of
from distributed.planner.estimates.model_facts import Cut, FactsSource, ModelFacts, Size
from distributed.planner.estimates.rates import Rates, rates_of
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import TimeParts
from distributed.planner.estimates.work_facts import Operations
from distributed.planner.pipeline import MEASURABLE, ZERO_BUBBLE

__all__ = ["FactsTimer"]


class _Pass(NamedTuple):
    """Seconds of one micro-batch on one rank.

    Attributes:
        forward: computation of the forward pass.
        backward: computation of the backward pass, recomputation included.
        exchanges: collectives among ranks that share the model, which the next operation waits for.
    """

    forward: float
    backward: float
    exchanges: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.exchanges


class FactsTimer:
    """Predicts steps of one model on one kind of hardware.

    Args:
        source: facts of the model, or of each part of it if a backend can divide it.
        profile: the hardware. Curves that `calibrate` has measured take precedence over its rates.
        engine: the program that trains.
        codec_share: ``(codec, ranks) ->`` bytes that the codec sends, relative to gradients that are sent as
            they are.
    """

    def __init__(
        self,
        source: ModelFacts | FactsSource,
        profile: HardwareProfile,
        engine: Engine = OURS,
        codec_share: Callable[[str, int], float] = lambda codec, ranks: 1.0,
    ) -> None:
        self._source, self.profile, self.engine = source, profile, engine
        self.codec_share = codec_share

    def parts(self, split: Split) -> TimeParts:
        """Time of a step under `split`.

        Raises:
            UserError: the model cannot be divided so, or its operations were not counted.
        """
        return _Step(self, split).parts

    def interval(self, split: Split) -> tuple[float, float]:
        """Lower and upper end of the time of a step, by the spread of the profile."""
        return self.parts(split).interval(self.profile.achievable.spread)

    def mfu(self, split: Split, seconds: float) -> float:
        """Floating-point operations of the whole model in a step of `seconds`, as a share of the peak of all
        devices. Recomputation is not counted, and attention without a causal saving (Chowdhery et al., 2022,
        arXiv:2204.02311)."""
        dims = split.dims
        samples = split.micro_batch * split.num_micro_batches * dims.data * dims.shard
        peak = self.profile.peak_of(dims.world_size, split.precision)
        return self.facts(Cut()).work.flops(samples) / (seconds * peak)

    def facts(self, cut: Cut) -> ModelFacts:
        """Facts of one rank of `cut`.

        Raises:
            UserError: only facts of the uncut model were given, or they have no counts.
        """
        if not isinstance(self._source, ModelFacts):
            facts = self._source(cut)
        elif cut == Cut():
            facts = self._source
        else:
            raise UserError(
                "the facts of the whole model do not say what a rank of a divided one computes",
                field="facts",
                got=", ".join(f"{name}={value}" for name, value in cut._asdict().items()),
                allowed="a function that returns the facts of each part",
                remedy="Pass the function that collects facts of a cut instead of one ModelFacts",
            )
        if not facts.work.blocks:
            raise UserError(
                "the operations of the model were not counted",
                field="facts",
                got=facts.name,
                remedy="Collect the facts of the model with this version",
            )
        return facts


@dataclass(frozen=True)
class _Step:
    """One step under one split."""

    timer: FactsTimer
    split: Split

    @cached_property
    def rates(self) -> Rates:
        split = self.split
        return rates_of(self.timer.profile, split.precision, split.dims.world_size, self.timer.engine)

    @cached_property
    def stages(self) -> list[ModelFacts]:
        """Facts of each stage, in order of the stages; one for an undivided depth."""
        dims, split = self.split.dims, self.split
        cut = Cut(dims.tensor, dims.context, dims.expert)
        if dims.pipeline == 1:
            return [self.timer.facts(cut)]
        number = dims.pipeline * self.chunks
        cuts = (cut._replace(pipeline=dims.pipeline, schedule=split.schedule, stage=s) for s in range(number))
        return [self.timer.facts(each) for each in cuts]

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        split = self.split
        return (
            1
            if split.dims.pipeline == 1 or split.schedule in MEASURABLE
            else self.timer.engine.stages_per_rank
        )

    @cached_property
    def passes(self) -> list[_Pass]:
        """Time of a micro-batch in each stage."""
        return [self._pass(facts) for facts in self.stages]

    @property
    def parts(self) -> TimeParts:
        split, count = self.split, self.split.num_micro_batches
        ranks = split.dims.pipeline
        compute = sum(each.forward + each.backward for each in self.passes) / ranks
        exchanges = sum(each.exchanges for each in self.passes) / ranks
        adding = (count - 1) * max(map(self._accumulation, self.stages))
        bubble, sends = self._pipeline()
        bubble = self.rates.idle(bubble, count * compute + adding)
        exposed = count * exchanges + sends + max(map(self._beside, range(ranks)))
        exposed += self._updates()
        if split.dims.world_size > 1:
            exposed += self.rates.waiting(count * compute)
        moved = sum(size.at(split.micro_batch) for size in self.stages[0].first.inputs)
        data = count * moved / self.timer.profile.host_link
        return TimeParts(count * compute + adding, exposed, bubble, data, self._optimizer())

    # -- one micro-batch ------------------------------------------------------------------

    def _pass(self, facts: ModelFacts) -> _Pass:
        split, rates = self.split, self.rates
        forward = backward = 0.0
        for index, block in enumerate(facts.work.blocks):
            ahead = rates.compute(block.forward, split.micro_batch)
            forward += ahead
            backward += rates.compute(block.backward, split.micro_batch, backward=True)
            if split.activation_checkpointing and index:
                backward += ahead
        return _Pass(forward, backward, self._exchanges(facts))

    def _exchanges(self, facts: ModelFacts) -> float:
        """Collectives of a micro-batch in the ranks' shared model."""
        line = facts.first
        if self.split.activation_checkpointing and facts.first_recomputed is not None:
            line = facts.first_recomputed
        dims, seconds = self.split.dims, 0.0
        for collective in line.collectives:
            if collective.axis not in _SHARED or collective.axis == "pipeline":
                continue
            name = _OPERATIONS.get(collective.operation, collective.operation)
            nbytes = collective.size.at(self.split.micro_batch)
            seconds += self._collective(dims, collective.axis, name, nbytes)
        return seconds

    def _collective(self, dims: ParallelDims, axis: str, operation: str, nbytes: float) -> float:
        if axis == "expert":
            link = link_of(self.timer.profile, dims, "data", "shard", size=dims.expert)
        else:
            link = link_of(self.timer.profile, dims, axis)
        return self.rates.collective(operation, link, nbytes)

    def _accumulation(self, facts: ModelFacts) -> float:
        """Adding the gradients of a micro-batch to those of the ones before."""
        each = (Size(3 * p.nbytes) for p in facts.parameters if p.trained)
        added = [Operations("elementwise", 1, Size(0), nbytes) for nbytes in each]
        return self.rates.compute(added, 1, backward=True)

    # -- pipeline -----------------------------------------------------------------------

    def _pipeline(self) -> tuple[float, float]:
        """Seconds of waiting for other stages, and of messages between them: as in `StepTimer`."""
        split, ranks = self.split, self.split.dims.pipeline
        if ranks == 1:
            return 0.0, 0.0
        count = split.num_micro_batches
        by_rank = [sum(each.total for each in self.passes[rank::ranks]) for rank in range(ranks)]
        average, slowest = sum(by_rank) / ranks, max(by_rank)
        message = self._message() * self.timer.engine.sends_exposed
        splits = split.schedule in ZERO_BUBBLE
        path = ranks * average * (2 / 3 if splits else 1.0)
        ends = (ranks - 1) * average / (self.chunks * (3 if splits else 1))
        ends = max(ends, path - count * average) + (ranks - 1) * message
        return ends + count * (slowest - average), count * self.chunks * message

    def _message(self) -> float:
        """What the largest stage receives for a micro-batch, forward and backward."""
        return max(
            sum(
                self._collective(self.split.dims, "pipeline", "send-recv", size.at(self.split.micro_batch))
                for size in facts.received
                if size.at(self.split.micro_batch)
            )
            for facts in self.stages
        )

    # -- gradients and shards -------------------------------------------------------------

    def _beside(self, rank: int) -> float:
        """Exposed part of gathers, which run beside all computation, and of reductions, beside backward, on a
        rank of the pipeline. Facts of each of its stages have the parameters of all of them."""
        split, facts = self.split, self.stages[rank]
        if split.dims.data * split.dims.shard * split.dims.context == 1:
            return 0.0
        rounds = split.num_micro_batches if split.zero_stage > 1 else 1
        reductions = rounds * self._reduction(facts)
        gathers = self._gathers(facts)
        own = self.passes[rank :: split.dims.pipeline]
        backward = rounds * sum(each.backward for each in own)
        compute = split.num_micro_batches * sum(each.forward + each.backward for each in own)
        copies = self._copies(facts)
        if gathers:
            units = self._units(facts)
            number = rounds * len(units) + split.num_micro_batches * (2 * len(units) - (0 in units))
            return self.rates.gathered(reductions + gathers, number, compute) + copies
        # The last bucket is complete when backward ends.
        last = min(reductions, rounds * self._last_bucket(facts))
        return last + self.rates.exposed(reductions - last, backward) + copies

    def _gathers(self, facts: ModelFacts) -> float:
        """All-gathers of sharded parameters in a step: of each unit before forward, and before backward where
        it was freed."""
        split, dims = self.split, self.split.dims
        if dims.shard == 1 and split.zero_stage < 3:
            return 0.0
        axis = "shard" if dims.shard > 1 else "data"
        seconds = 0.0
        for block, nbytes in self._units(facts).items():
            times = 2 if block else 1
            seconds += times * self._collective(dims, axis, "all-gather", nbytes)
        return split.num_micro_batches * seconds

    def _units(self, facts: ModelFacts) -> dict[int, int]:
        """Block -> bytes of its parameters, which are gathered and reduced together."""
        found: dict[int, int] = {}
        for parameter in facts.parameters:
            found[parameter.block] = found.get(parameter.block, 0) + parameter.nbytes
        return found

    def _reduction(self, facts: ModelFacts) -> float:
        """One reduction of the gradients of this rank."""
        split, dims = self.split, self.split.dims
        if dims.shard == 1 or split.zero_stage:
            return self._buckets(facts)
        units = self._units(facts)
        seconds = 0.0
        for nbytes in units.values():
            seconds += self._collective(dims, "shard", "reduce-scatter", nbytes)
            seconds += self._collective(dims, "data", "all-reduce", nbytes / dims.shard)
            seconds += self._collective(dims, "context", "all-reduce", nbytes / dims.shard)
        return seconds

    def _buckets(self, facts: ModelFacts) -> float:
        """Gradients that are reduced in buckets, those of experts apart."""
        split, dims = self.split, self.split.dims
        experts = sum(p.nbytes for p in facts.parameters if p.trained and p.is_expert)
        others = sum(p.nbytes for p in facts.parameters if p.trained) - experts
        if split.zero_stage:
            operation = "all-reduce" if split.zero_stage == 1 else "reduce-scatter"
            return self._in_buckets(operation, ("data",), others, facts.bucket_bytes)
        # Ranks along context hold copies as well, and are in the same group.
        axes = tuple(axis for axis in ("data", "context") if dims.size(axis) > 1) or ("data",)
        seconds = self._in_buckets("all-reduce", axes, others, facts.bucket_bytes)
        if experts:
            link = link_of(self.timer.profile, dims, "data", size=dims.expert_data, step=dims.expert)
            seconds += self.rates.collective("all-reduce", link, experts)
        return seconds

    def _in_buckets(self, operation: str, axes: tuple[str, ...], nbytes: float, size: float) -> float:
        """Full buckets of `size` of `nbytes` bytes of gradients, and the last one."""
        full, left = divmod(nbytes, size)
        seconds = full * self._bucket(operation, axes, size) if full else 0.0
        return seconds + (self._bucket(operation, axes, left) if left else 0.0)

    def _bucket(self, operation: str, axes: tuple[str, ...], nbytes: float) -> float:
        split = self.split
        link = link_of(self.timer.profile, split.dims, axes[-1], size=split.dims.size(*axes))
        share = self.timer.codec_share(split.codec, link.size) if operation == "all-reduce" else 1.0
        return self.rates.collective(operation, link, nbytes * share)

    def _last_bucket(self, facts: ModelFacts) -> float:
        """Reduction of the gradients that backward computes last."""
        nbytes = sum(p.nbytes for p in facts.parameters if p.trained and not p.is_expert)
        dims = self.split.dims
        axes = tuple(axis for axis in ("data", "context") if dims.size(axis) > 1) or ("data",)
        return self._bucket(
            "all-reduce", axes, min(nbytes, nbytes % facts.bucket_bytes or facts.bucket_bytes)
        )

    def _copies(self, facts: ModelFacts) -> float:
        """Copies of gradients into buckets, with the hooks that make them, and of shards into and out of what
        is gathered."""
        split, dims, copy = self.split, self.split.dims, self.rates.copy
        if dims.shard == 1 and not split.zero_stage:
            trained = [p for p in facts.parameters if p.trained]
            hooks = self.rates.replicas(len(trained)) if dims.model_parallel_size == 1 else 0.0
            return 2.0 * sum(copy(2 * p.nbytes) for p in trained) + hooks
        units = self._units(facts)
        gathers = sum((2 if block else 1) * copy(2 * nbytes) for block, nbytes in units.items())
        gathers *= split.num_micro_batches if dims.shard > 1 or split.zero_stage > 2 else 0
        return gathers + 2.0 * sum(copy(2 * nbytes) for nbytes in units.values())

    def _updates(self) -> float:
        """All-gather of updated weights under ZeRO 1 and 2."""
        split = self.split
        if split.zero_stage not in (1, 2):
            return 0.0
        nbytes = max(sum(p.nbytes for p in facts.parameters if p.trained) for facts in self.stages)
        return self._collective(split.dims, "data", "all-gather", nbytes)

    # -- optimizer ----------------------------------------------------------------------

    def _optimizer(self) -> float:
        return max(map(self._update, self.stages))

    def _update(self, facts: ModelFacts) -> float:
        """The update of what this rank holds."""
        split, work = self.split, facts.work.optimizer
        trained = [p for p in facts.parameters if p.trained]
        if split.zero_stage:
            ranks = split.dims.data
            numbers = [-(-sum(p.numel for p in trained) // ranks)]
        else:
            numbers = [p.shard_bytes(split.dims.shard) // p.itemsize for p in trained]
        if split.offload:
            elements = sum(numbers)
            return elements * _OFFLOADED_BYTES / self.timer.profile.host_link
        if work.at_once:
            numbers = [sum(numbers)]
        return sum(self._update_of(facts, number) for number in numbers)

    def _update_of(self, facts: ModelFacts, number: int) -> float:
        nbytes = sum(each.number * each.nbytes.at(number) for each in facts.work.optimizer.operations)
        dims = self.split.dims
        return self.rates.update(nbytes, sharded=dims.shard * dims.tensor > 1)


_SHARED = ("tensor", "context", "expert", "pipeline")
_OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send": "send-recv",
}
_OFFLOADED_BYTES = 28 + 8
"""Bytes of an element on its way between host and device, with those of its update in host memory."""
