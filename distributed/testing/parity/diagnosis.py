"""First divergence of two records, and its likely causes.

Each guess rests on one observation that a kind of mistake is known to leave; `mutants` are tried
against them. The order of a step is: loss, gradient norm, update at the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from distributed.testing.parity.measure import Exercise, Record

__all__ = ["TOLERANCES", "Divergence", "Row", "compare", "first_divergence"]

TOLERANCES = {
    ("float64", "sgd"): 1e-9,
    ("float64", "momentum"): 1e-9,
    ("float64", "adamw"): 1e-9,
    ("float32", "sgd"): 1e-6,
    ("float32", "momentum"): 1e-6,
    ("float32", "adamw"): 1e-5,
    ("bf16", "sgd"): 2e-2,
    ("bf16", "momentum"): 2e-2,
    ("bf16", "adamw"): 2e-2,
}
"""Largest difference that rounding explains, by dtype and optimizer."""

_NEAR = 1e-3
"""Largest distance of a ratio of norms from the whole number that it is taken for."""

_ROUNDS = 2e-3
"""Relative differences below it may come from rounding to a narrower type."""


@dataclass(frozen=True)
class Row:
    """One step of both: ``(A, B)`` of each metric, and the largest distance between the weights
    after it, None where they are not known."""

    step: int
    loss: tuple[float, float]
    norm: tuple[float, float]
    rate: tuple[float, float]
    distance: float | None


@dataclass(frozen=True)
class Divergence:
    """The first difference beyond the tolerance.

    Attributes:
        step: number of the step, from 1.
        figure: ``initial weights``, ``loss``, ``gradient norm``, ``learning rate`` or ``weights``.
        values: values of A and B; for weights, 0 and the distance.
        causes: likely causes, the likeliest first.
    """

    step: int
    figure: str
    values: tuple[float, float]
    causes: tuple[str, ...]


def compare(a: Record, b: Record) -> list[Row]:
    """The two records side by side."""
    rows = []
    for index in range(len(a.losses)):
        rows.append(
            Row(
                index + 1,
                (a.losses[index], b.losses[index]),
                (a.norms[index], b.norms[index]),
                (a.rates[index], b.rates[index]),
                _distance(a.weights[index + 1], b.weights[index + 1]),
            )
        )
    return rows


def first_divergence(a: Record, b: Record, exercise: Exercise, tolerance: float) -> Divergence | None:
    """The first difference above `tolerance` (relative for values above 1), or None."""
    case = _Case(a, b, exercise, tolerance)
    start = _distance(a.weights[0], b.weights[0])
    if start is not None and start > tolerance:
        cause = "the models begin with different weights: another seed, or no broadcast from rank 0"
        return Divergence(1, "initial weights", (0.0, start), (cause,))
    for row in compare(a, b):
        for figure, values, causes in _figures(row):
            if _differ(values, tolerance):
                return Divergence(row.step, figure, values, tuple(causes(case, row)))
    return None


@dataclass(frozen=True)
class _Case:
    a: Record
    b: Record
    exercise: Exercise
    tolerance: float

    @property
    def sides(self) -> tuple[str, str]:
        a, b = str(self.a.side), str(self.b.side)
        return ("A", "B") if a == b else (a, b)


_Causes = Callable[[_Case, Row], Iterator[str]]


def _figures(row: Row) -> Iterator[tuple[str, tuple[float, float], _Causes]]:
    yield "loss", row.loss, _of_loss
    if not any(map(math.isnan, row.norm)):
        yield "gradient norm", row.norm, _of_norm
    yield "learning rate", row.rate, _of_rate
    if row.distance is not None:
        yield "weights", (0.0, row.distance), _of_weights


def _of_loss(case: _Case, row: Row) -> Iterator[str]:
    yield from _of_rounding(row.loss)
    if case.exercise.is_ragged(row.step):
        yield _RAGGED
    elif not _differ(row.norm, max(case.tolerance, _NEAR)):
        yield "the gradients agree: the loss is reported from one rank's samples instead of all ranks'"
    elif row.step == 1:
        yield (
            "data order: the ranks do not take the contiguous slices of the global batch, one repeats"
            " another's, or a part of it is not computed"
        )
    elif case.a.weights[row.step - 1] is None or case.b.weights[row.step - 1] is None:
        yield "the weights may have diverged at an earlier step: one of the two does not expose them"
    else:
        yield "data order: a later global batch holds other samples (the epoch's seed, or the cursor)"


def _of_norm(case: _Case, row: Row) -> Iterator[str]:
    for who, norm in zip(case.sides, row.norm, strict=True):
        if norm == 0.0:
            where = ", the epoch's last and smaller one" if case.exercise.is_ragged(row.step) else ""
            yield f"{who} leaves this batch out{where}: its gradient is zero"
            return
    found = [*_ratio_causes(case, row.norm[1] / row.norm[0])]
    if not found and case.exercise.is_ragged(row.step):
        found.append(_RAGGED)
    found += _of_rounding(row.norm)
    yield from found or [
        "the gradient is not that of the whole global batch: not reduced over the ranks, reduced for some"
        " micro-batches alone, or clipped before it was reduced"
    ]


def _ratio_causes(case: _Case, ratio: float) -> Iterator[str]:
    (a, b), (ranks_a, ranks_b) = case.sides, (case.a.side.ranks, case.b.side.ranks)
    accumulation = case.exercise.accumulation
    for who, ranks, factor in ((b, ranks_b, ratio), (a, ranks_a, 1 / ratio)):
        for number, summed, twice in (
            (ranks, "gradients are summed over {n} ranks, not averaged", "averaged over {n} ranks twice"),
            (
                accumulation,
                "the losses of {n} micro-batches are summed, not averaged",
                "divided by {n} accumulation steps twice",
            ),
        ):
            if number > 1 and math.isclose(factor, number, rel_tol=_NEAR):
                yield f"{who}: {summed.format(n=number)}"
            if number > 1 and math.isclose(factor, 1 / number, rel_tol=_NEAR):
                yield f"{who}: gradients are {twice.format(n=number)}"


def _of_rate(case: _Case, row: Row) -> Iterator[str]:
    ratio = row.rate[1] / row.rate[0] if row.rate[0] else math.inf
    ranks = case.b.side.ranks
    if row.step == 1 and ranks > 1 and math.isclose(ratio, ranks, rel_tol=_NEAR):
        yield f"{case.sides[1]}: the learning rate is multiplied by {ranks} ranks"
    yield "the schedule advances differently: by epoch, by micro-batch, or once per rank instead of by step"


def _of_weights(case: _Case, row: Row) -> Iterator[str]:
    limit = case.exercise.options.get("gradient_clipping")
    if limit is not None and max(row.norm) > float(limit):
        yield "clipping: not by the norm of the whole gradient, or not once after accumulation"
    yield from _of_rounding((1.0, 1.0 + (row.distance or 0.0)))
    if row.step == 1:
        yield "the optimizer: another kind, or other settings (weight decay, momentum, eps)"
    else:
        yield "the optimizer's state, or the learning rate in use is not the one reported"


_RAGGED = (
    "the epoch's last, smaller batch: padded with repeated samples, or a mean of the ranks' or"
    " micro-batches' means instead of the mean over samples"
)


def _of_rounding(values: tuple[float, float]) -> Iterator[str]:
    off = abs(values[0] - values[1]) / max(map(abs, values))
    if off < _ROUNDS:
        width = "float32" if off < 2**-18 else "half precision"
        yield f"rounding, by its size ({off:.0e}) {width}: is a narrower type used to compute or to reduce?"


def _differ(values: tuple[float, float], tolerance: float) -> bool:
    a, b = values
    # Written so that NaN differs from a number.
    return not (abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)) or (math.isnan(a) and math.isnan(b)))


def _distance(a: list[Tensor] | None, b: list[Tensor] | None) -> float | None:
    if a is None or b is None:
        return None
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
