"""Search the fastest splits that fit, by branch and bound.

Groups of candidates are visited in the order of a lower bound of their time. A group is left out when the
table is full and its bound is above the slowest plan there. The bounds hold for the time model of
`StepTimer`, because a larger micro-batch never raises the time of a token:

- computation and collectives of the blocks, at the largest micro-batch and without recomputation;
- the ends of the pipeline, at a micro-batch of one sample.

A test compares the result with that of an exhaustive search. Source: Land and Doig, 1960
(doi:10.2307/1910129).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from math import inf

from distributed.errors import UserError
from distributed.planner.estimates.block_time import block_time, output_time
from distributed.planner.estimates.candidates import (
    Group,
    SearchSpace,
    groups,
    leaves,
    micro_batches,
    schedule_refusal,
    sized,
)
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer, TimeParts

__all__ = ["Ranked", "Rejected", "Table", "lower_bound", "search"]

_SLOWER = "slower than the listed plans"

_ROUNDING = 1e-9
"""Relative difference that the order of additions can make between a bound and a time."""


@dataclass(frozen=True)
class Ranked:
    """A plan that fits.

    Attributes:
        split: the plan.
        time: seconds of a step by part.
        memory: bytes of the rank that needs most.
        mfu: share of the peak of all devices that the model's operations take.
    """

    split: Split
    time: TimeParts
    memory: float
    mfu: float

    @property
    def key(self) -> tuple[object, ...]:
        """Order of plans: time, then memory, then the simpler one."""
        s = self.split
        dims = (s.dims.pipeline, s.dims.context, s.dims.tensor, s.dims.expert, s.dims.shard, s.dims.data)
        settings = (s.offload, s.activation_checkpointing, s.codec, s.zero_stage, s.schedule, s.backend)
        return (self.time.total, self.memory, dims, settings, s.micro_batch)


@dataclass(frozen=True)
class Rejected:
    """Candidates that were rejected for one reason.

    Attributes:
        subject: the group, or the plan, in words.
        reason: the first reason.
        count: number of candidates; of a group that was not opened, 0.
    """

    subject: str
    reason: str
    count: int = 0


@dataclass
class Table:
    """Result of a search.

    Attributes:
        plans: fastest first.
        rejected: the first reason of each candidate, or group of candidates, that is not among the plans.
        timed: number of candidates whose time was computed.
    """

    plans: list[Ranked] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    timed: int = 0

    def reasons(self) -> Counter[str]:
        """Reason -> how often it was the first one."""
        found: Counter[str] = Counter()
        for entry in self.rejected:
            found[entry.reason] += max(1, entry.count)
        return found


class _Slowest:
    """Kept in a heap: the slowest of the plans is the first."""

    __slots__ = ("plan",)

    def __init__(self, plan: Ranked) -> None:
        self.plan = plan

    def __lt__(self, other: _Slowest) -> bool:
        return bool(other.plan.key < self.plan.key)


def search(
    space: SearchSpace,
    timer: StepTimer,
    memory: Callable[[Split], float],
    limit: float,
    plans: int = 10,
    pruned: bool = True,
    refuses: Callable[[Split], str | None] = lambda split: None,
) -> Table:
    """The fastest plans of `space` that fit.

    Args:
        timer: predicts the time of a step.
        memory: predicts the bytes of a rank.
        limit: bytes that a rank may take.
        plans: number of plans in the table.
        pruned: whether groups are left out by their bounds; false computes every candidate.
        refuses: why a run cannot train a split, for reasons that capabilities do not show; None if it can.
            Called for the splits that would enter the table.

    Raises:
        UserError: no way to divide the ranks can train the model.
    """
    _check_precision(space)
    run = _Search(space, timer, memory, limit, plans, refuses)
    for bound, name, group in run.open_groups():
        if pruned and bound > run.slowest:
            run.reject(name, "a lower bound of its time is above the slowest listed plan")
        else:
            run.visit(group)
    run.table.plans = sorted((entry.plan for entry in run.kept), key=lambda plan: plan.key)
    return run.table


class _Search:
    """State of one search.

    Attributes:
        table: the result so far, without its plans.
        kept: heap of the fastest plans so far.
    """

    def __init__(
        self,
        space: SearchSpace,
        timer: StepTimer,
        memory: Callable[[Split], float],
        limit: float,
        plans: int,
        refuses: Callable[[Split], str | None],
    ) -> None:
        self.space, self.timer, self.memory = space, timer, memory
        self.limit, self.plans, self.refuses = limit, plans, refuses
        self.table, self.kept = Table(), list[_Slowest]()

    @property
    def slowest(self) -> float:
        """Seconds of the slowest plan of a full table; infinite before it is full."""
        return self.kept[0].plan.time.total if len(self.kept) >= self.plans else inf

    def reject(self, subject: str, reason: str, count: int = 0) -> None:
        """Note the first reason of a candidate or group."""
        self.table.rejected.append(Rejected(subject, reason, count))

    def open_groups(self) -> list[tuple[float, str, Group]]:
        """Lower bound, name and group, by ascending bound."""
        found = []
        for group, reason in groups(self.space):
            if reason is None:
                found.append((lower_bound(self.space, self.timer, group), str(group), group))
            else:
                self.reject(str(group), reason)
        if not found:
            raise _nothing_divides(self.space, self.table)
        return sorted(found, key=lambda entry: entry[:2])

    def visit(self, group: Group) -> None:
        """Predict every candidate of a group."""
        sizes = micro_batches(self.space, group)
        for leaf, reason in leaves(self.space, group):
            if reason is not None:
                self.reject(_text(leaf), reason, len(sizes))
                continue
            for split in sized(self.space, leaf, sizes):
                self._predict(split)

    def _predict(self, split: Split) -> None:
        layers, stages = self.space.numbers.layers, split.dims.pipeline
        reason = schedule_refusal(split.schedule, stages, split.num_micro_batches, layers)
        if reason is not None:
            self.reject(_text(split), reason, 1)
        elif (taken := self.memory(split)) > self.limit:
            self.reject(_text(split), "a rank needs more memory than the device has", 1)
        else:
            self.table.timed += 1
            time = self.timer.parts(split)
            self._keep(Ranked(split, time, taken, self.timer.mfu(split, time.total)))

    def _keep(self, plan: Ranked) -> None:
        full = len(self.kept) >= self.plans
        if full and self.kept[0].plan.key < plan.key:
            self.reject(_text(plan.split), _SLOWER, 1)
        elif (reason := self.refuses(plan.split)) is not None:
            self.reject(_text(plan.split), reason, 1)
        elif full:
            self.reject(_text(heapreplace(self.kept, _Slowest(plan)).plan.split), _SLOWER, 1)
        else:
            heappush(self.kept, _Slowest(plan))


def lower_bound(space: SearchSpace, timer: StepTimer, group: Group) -> float:
    """Seconds that no candidate of the group goes below."""
    numbers, stages = timer.numbers, group.dims.pipeline
    share = numbers.global_batch // group.dims.data_parallel_size
    seconds = _stage_time(space, timer, group, share)
    if stages > 1:
        chunks = 3 * timer.engine.stages_per_rank
        seconds += (stages - 1) * _stage_time(space, timer, group, 1) / chunks
    return seconds * (1.0 - _ROUNDING)


def _stage_time(space: SearchSpace, timer: StepTimer, group: Group, micro_batch: int) -> float:
    """Mean seconds of a stage for one micro-batch, without recomputation."""
    split = Split(group.dims, group.spec.name, micro_batch=micro_batch, precision=space.precision)
    block = block_time(timer.numbers, split, timer.profile, timer.engine)
    output = output_time(timer.numbers, split, timer.profile)
    return (timer.numbers.layers * (block.compute + block.exposed) + output.compute) / group.dims.pipeline


def _text(split: Split) -> str:
    parts = [split.backend, str(split.dims), f"micro_batch {split.micro_batch}"]
    if split.dims.pipeline > 1:
        parts.append(split.schedule)
    parts += [name for name in ("activation_checkpointing", "offload") if getattr(split, name)]
    parts += [f"zero_stage {split.zero_stage}"] if split.zero_stage else []
    return ", ".join(parts)


def _check_precision(space: SearchSpace) -> None:
    able = sorted({name for spec in space.backends for name in spec.capabilities.precisions})
    if space.precision not in able:
        raise UserError(
            "no backend trains in this precision",
            field="precision",
            got=space.precision,
            allowed=", ".join(able),
            remedy="Choose one of these",
        )


def _nothing_divides(space: SearchSpace, table: Table) -> UserError:
    batch, ranks = space.numbers.global_batch, space.world_size
    low = batch - batch % ranks
    nearest = f"{low} or {low + ranks}" if low else str(ranks)
    reason = table.reasons().most_common(1)[0][0] if table.rejected else "no backend was given"
    return UserError(
        f"no way to divide {ranks} ranks trains this model; most often, {reason}",
        field="global_batch",
        got=batch,
        allowed=f"{nearest}, which every number of ranks with different samples divides",
        remedy="Choose one of these, another number of ranks, or more backends",
    )
