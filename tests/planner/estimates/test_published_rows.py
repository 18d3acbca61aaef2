"""Errors of the shipped parameters on published runs. They follow from files alone."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest

from tests.benchmarks.planner_time import ASIDE, FITTED, FREE, Parameters, errors, fit, regrets
from tests.benchmarks.planner_time_rows import published, vtrain

SHIPPED = Parameters.of((), ())


def test_the_shipped_parameters_are_those_of_the_fit() -> None:
    """Rounded to three digits in the profile."""
    fitted = fit([row for name in FITTED for row in vtrain(name)])
    for name in FREE:
        of = [p.latency if name == "latency" else getattr(p.achievable, name) for p in (fitted, SHIPPED)]
        assert of[0] == pytest.approx(of[1], rel=0.01), name


@pytest.mark.parametrize(("name", "limit"), [("vtrain_multi_fit", 0.08), ("vtrain_single_fit", 0.08)])
def test_rows_that_were_fitted(name: str, limit: float) -> None:
    rows = vtrain(name)
    assert mean(errors(rows, SHIPPED.ratio)) < limit
    assert mean(regrets(rows, SHIPPED.ratio)) < 0.03


@pytest.mark.parametrize("source", ["megatron-2021", "recompute-2022"])
def test_tables_that_were_not_fitted(source: str) -> None:
    rows = [row for row in published() if row.source == source]
    assert len(rows) >= 4
    assert mean(errors(rows, SHIPPED.ratio)) < 0.10


@pytest.mark.parametrize("name", ASIDE)
def test_rows_that_were_kept_aside(name: str) -> None:
    rows = vtrain(name)
    assert mean(errors(rows, SHIPPED.ratio)) < 0.10
    assert mean(regrets(rows, SHIPPED.ratio)) < 0.08


def test_the_h100_has_the_fitted_share_of_its_peak() -> None:
    shipped = Parameters.of((), (), "H100")
    (fitted,) = [row for row in published() if row.source == "llama3-8192"]
    assert shipped.ratio(fitted) == pytest.approx(1.0, abs=0.005)
    others = [row for row in published() if row.source == "llama3-16384"]
    assert mean(errors(others, shipped.ratio)) < 0.10


def test_the_elementwise_traffic_is_that_of_the_fit() -> None:
    """With one rate of the H100, it explains a run with and a run without compilation."""
    rows = [row for row in published() if row.source == "torchtitan-8"]
    fitted = fit(rows, ["matmul"], "H100")
    assert [fitted.ratio(row) for row in rows] == pytest.approx([1.0, 1.0], abs=0.01)


def test_the_interval_holds_four_of_five_rows() -> None:
    factor = 1.0 + SHIPPED.achievable.spread
    for names in (FITTED, ASIDE):
        ratios = [SHIPPED.ratio(row) for name in names for row in vtrain(name)]
        assert mean(1 / factor <= ratio <= factor for ratio in ratios) > 0.78


def test_errors_and_regrets_by_hand() -> None:
    rows = [
        replace(row, group=(1,), seconds=s)
        for row, s in zip(vtrain(FITTED[0]), (1.0, 2.0, 4.0), strict=False)
    ]
    ratios = dict(zip(map(id, rows), (1.5, 0.5, 1.0), strict=True))
    assert errors(rows, lambda row: ratios[id(row)]) == [0.5, 0.5, 0.0]
    # Predicted 1.5, 1.0 and 4.0 s: the second is chosen, and takes twice as long as the best.
    assert regrets(rows, lambda row: ratios[id(row)]) == [1.0]


def test_a_worse_parameter_has_a_larger_error() -> None:
    rows = vtrain("vtrain_multi_fit")
    worse = Parameters.of((SHIPPED.achievable.matmul / 2,), ("matmul",))
    assert mean(errors(rows, worse.ratio)) > 2 * mean(errors(rows, SHIPPED.ratio))
    assert math.isfinite(worse.ratio(rows[0]))
