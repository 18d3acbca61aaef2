"""MeasuredNode: how long operations and collectives take on one node, by size and by ranks that share it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import exp, log
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from distributed.planner.estimates.work_facts import MEASURED_KINDS

__all__ = ["Curve", "MeasuredNode", "MeasuredRanks", "seconds_of"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_curve(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    sizes, seconds = zip(*points, strict=True)
    if list(sizes) != sorted(set(sizes)):
        raise ValueError("the sizes of a curve must rise")
    if list(seconds) != sorted(seconds):
        raise ValueError("the seconds of a curve must not fall with the size")
    return points


def _check_kinds(curves: Mapping[str, object]) -> Mapping[str, object]:
    differing = sorted(set(curves) ^ set(MEASURED_KINDS))
    if differing:
        raise ValueError(f"one curve for each kind of operation; missing or unknown: {', '.join(differing)}")
    return curves


Curve = Annotated[tuple[tuple[Positive, Positive], ...], Field(min_length=1), AfterValidator(_check_curve)]
"""(size, seconds) in order of size: floating-point operations or bytes, and the time of one call."""


def seconds_of(curve: tuple[tuple[float, float], ...], size: float) -> float:
    """Seconds at `size`: a line between the logarithms of two points, as long as the first point below it,
    and at the rate of the last point above it."""
    (first, least), (last, most) = curve[0], curve[-1]
    if size <= first:
        return least
    if size >= last:
        return most * size / last
    at = bisect_left(curve, (size,))
    (below, fast), (above, slow) = curve[at - 1], curve[at]
    share = log(size / below) / log(above / below)
    return exp(log(fast) * (1.0 - share) + log(slow) * share)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeasuredRanks(_Section):
    """What was measured while so many ranks of one node computed at the same time.

    Attributes:
        threads: of each rank.
        operations: each of `distributed.planner.estimates.work_facts.MEASURED_KINDS` -> time by
            floating-point operations (`MATRIX_KINDS`) or bytes, in float32.
        forward_seconds: seconds of the host for each operation of forward, beyond the curves.
        backward_seconds: the same of backward.
        update_seconds: seconds of the host for the update of each parameter, beyond its curve.
        collectives: operation -> number of ranks of a group -> time by bytes. All groups of this size
            communicate at the same time.
        overlap: share of a collective's time that computation beside it hides.
        skew: by how much the slowest rank is behind the mean one, as a share of the computation.
        replica_seconds: seconds of the host for each parameter whose gradients DDP reduces.
        unit_seconds: seconds for each gather and each reduction of a unit of FSDP2, beyond the collective.
        sharded_update_seconds: seconds for the update of each sharded parameter, beyond that of a whole one.
    """

    threads: int = Field(ge=1)
    operations: Annotated[Mapping[str, Curve], AfterValidator(_check_kinds)]
    forward_seconds: Seconds
    backward_seconds: Seconds
    update_seconds: Seconds
    collectives: Mapping[str, Mapping[int, Curve]] = {}
    overlap: float = Field(default=0.0, ge=0, le=1)
    skew: Seconds = 0.0
    replica_seconds: Seconds = 0.0
    unit_seconds: Seconds = 0.0
    sharded_update_seconds: Seconds = 0.0


class MeasuredNode(_Section):
    """Measurements of one node.

    Attributes:
        cores: processors that the ranks share.
        asynchronous: whether the host launches operations and continues, as with GPUs.
        ranks: number of ranks at work -> what each of them reaches.
    """

    cores: int = Field(ge=1)
    asynchronous: bool = False
    ranks: Mapping[int, MeasuredRanks] = Field(min_length=1)

    def of(self, num_ranks: int) -> tuple[MeasuredRanks, float]:
        """Rates with `num_ranks` ranks on the node, and by how much they are slower than measured.

        More ranks than were measured share the cores in equal parts; a number in between has the rates of
        the next larger one.
        """
        enough = [number for number in sorted(self.ranks) if number >= num_ranks]
        if enough:
            return self.ranks[enough[0]], 1.0
        most = max(self.ranks)
        slower = 1.0 if self.asynchronous else max(1.0, num_ranks / max(most, self.cores))
        return self.ranks[most], slower
