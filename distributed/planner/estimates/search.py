"""Search the fastest splits that fit, by branch and bound.

Groups of candidates are visited in the order of a lower bound of their time (`Predictions.bound`). A group is
left out when the table is full and its bound is above the slowest plan there. A test compares the result with
that of an exhaustive search. Source: Land and Doig, 1960 (doi:10.2307/1910129).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from math import inf

from distributed.errors import UserError
from distributed.planner.estimates.candidates import (
    NO_MICRO_BATCH,
    Group,
    SearchSpace,
    groups,
    indivisible_batch,
    leaves,
    micro_batches,
    schedule_refusal,
    sized,
)
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.predictions import Predictions
from distributed.planner.estimates.split import Split, describe
from distributed.planner.estimates.time import TimeParts

__all__ = ["Ranked", "Rejected", "Table", "nothing_trains", "search"]

_SLOWER = "slower than the listed plans"
_TOO_LARGE = "a rank needs more memory than the device has"


@dataclass(frozen=True)
class Ranked:
    """A plan that fits.

    Attributes:
        split: the plan.
        time: seconds of a step by part.
        memory: bytes of the rank that needs most, by part.
        mfu: share of the peak of all devices that the model's operations take.
    """

    split: Split
    time: TimeParts
    memory: MemoryParts
    mfu: float

    @property
    def key(self) -> tuple[object, ...]:
        """Order of plans: time, then memory, then the simpler one."""
        s = self.split
        dims = (s.dims.pipeline, s.dims.context, s.dims.tensor, s.dims.expert, s.dims.shard, s.dims.data)
        settings = (s.offload, s.activation_checkpointing, s.codec, s.zero_stage, s.schedule, s.backend)
        return (self.time.total, self.memory.total, dims, settings, s.micro_batch)


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
    predictions: Predictions,
    limit: float,
    plans: int = 10,
    pruned: bool = True,
    refuses: Callable[[Split], str | None] = lambda split: None,
) -> Table:
    """The fastest plans of `space` that fit.

    Args:
        predictions: time and memory of the model.
        limit: bytes that a rank may take.
        plans: number of plans in the table.
        pruned: whether groups are left out by their bounds; false computes every candidate.
        refuses: why a run cannot train a split, for reasons that capabilities do not show; None if it can.
            Called for the splits that would enter the table.

    Raises:
        UserError: no way to divide the ranks can train the model.
    """
    _check_precision(space)
    run = _Search(space, predictions, limit, plans, refuses)
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
        predictions: Predictions,
        limit: float,
        plans: int,
        refuses: Callable[[Split], str | None],
    ) -> None:
        self.space, self.predictions = space, predictions
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
                share = self.space.sizes.global_batch // group.dims.data_parallel_size
                bound = self.predictions.bound(group.dims, share, self.space.precision)
                found.append((bound, str(group), group))
            else:
                self.reject(str(group), reason)
        if not found:
            raise nothing_trains(self.space, self.table)
        return sorted(found, key=lambda entry: entry[:2])

    def visit(self, group: Group) -> None:
        """Predict every candidate of a group."""
        sizes = micro_batches(self.space, group)
        if not sizes:
            self.reject(str(group), NO_MICRO_BATCH, 1)
            return
        for leaf, reason in leaves(self.space, group):
            if reason is not None:
                self.reject(describe(leaf), reason, len(sizes))
                continue
            for split in sized(self.space, leaf, sizes):
                self._predict(split)

    def _predict(self, split: Split) -> None:
        layers, stages = self.space.sizes.layers, split.dims.pipeline
        reason = schedule_refusal(split.schedule, stages, split.num_micro_batches, layers)
        if reason is not None:
            self.reject(describe(split), reason, 1)
            return
        if self.predictions.memory_bound(split) > self.limit:
            self.reject(describe(split), _TOO_LARGE, 1)
            return
        self.table.timed += 1
        try:
            time = self.predictions.time(split)
            # What is too slow needs no prediction of memory, which takes longer for a model object.
            memory = self.predictions.memory(split) if time.total <= self.slowest else None
        except UserError as error:
            self.reject(describe(split), error.message, 1)
            return
        if memory is None:
            self.reject(describe(split), _SLOWER, 1)
        elif memory.total > self.limit:
            self.reject(describe(split), _TOO_LARGE, 1)
        else:
            self._keep(Ranked(split, time, memory, self.predictions.mfu(split, time.total)))

    def _keep(self, plan: Ranked) -> None:
        full = len(self.kept) >= self.plans
        if full and self.kept[0].plan.key < plan.key:
            self.reject(describe(plan.split), _SLOWER, 1)
        elif (reason := self.refuses(plan.split)) is not None:
            self.reject(describe(plan.split), reason, 1)
        elif full:
            self.reject(describe(heapreplace(self.kept, _Slowest(plan)).plan.split), _SLOWER, 1)
        else:
            heappush(self.kept, _Slowest(plan))


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


def _indivisible(batch: int, ranks: int, each: int, others: str) -> UserError:
    """The error of a global batch of which ranks cannot have equal shares, each of a multiple of `each`."""
    unit = ranks * each
    low = batch - batch % unit
    nearest = f"{low} or {low + unit}" if low else str(unit)
    whom = f"{ranks} ranks with different samples" if ranks > 1 else "one rank"
    micro = f" that are multiples of {each} samples" if each > 1 else ""
    return UserError(
        f"{whom} cannot have equal shares of it{micro}{others}",
        field="global_batch_size",
        got=batch,
        allowed=f"{nearest}, which every number of ranks with different samples divides",
        remedy="Choose one of these, another number of ranks, or more backends"
        + ("; or leave batch_size and gradient_accumulation_steps out" if each > 1 else ""),
    )


def nothing_trains(space: SearchSpace, table: Table) -> UserError:
    """The error of a search without a split that can train, whose rejected candidates are in `table`.

    If some were rejected for the global batch, it names the nearest that all ranks divide: other reasons,
    such as that a sequence cannot be divided, belong to splits that are tried only because these are few.
    """
    batch, ranks = space.sizes.global_batch, space.world_size
    each = (space.micro_batch or 1) * (space.num_micro_batches or 1)
    reasons = table.reasons()
    of_batch = {indivisible_batch(batch), *((NO_MICRO_BATCH,) if each > 1 else ())}
    if of_batch & reasons.keys():
        other = next((reason for reason, _ in reasons.most_common() if reason not in of_batch), None)
        others = f"; of the other splits, {other}" if other is not None else ""
        return _indivisible(batch, ranks, each, others)
    reason, count = (reasons.most_common(1) or [("no split has what was asked for", 0)])[0]
    often = f" ({count:,} split{'s' if count > 1 else ''})" if count else ""
    return UserError(
        f"no way to divide {ranks} ranks trains this model; most often{often}, {reason}",
        field="num_devices",
        got=ranks,
        remedy="Choose another number of ranks, more backends, or fewer fields that a plan has to have",
    )
