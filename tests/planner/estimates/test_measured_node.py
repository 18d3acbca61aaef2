"""Measured curves: reading them, and files that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import UserError
from distributed.planner.estimates.hardware import load_profile, parse_profile
from distributed.planner.estimates.measured_node import MeasuredNode, MeasuredRanks, seconds_of
from tests.planner.estimates.measured_profiles import linear_ranks

OTHERS = linear_ranks().operations
CURVE = ((100.0, 2.0), (400.0, 4.0), (800.0, 12.0))


@pytest.mark.parametrize(
    ("size", "seconds"),
    # As long as the smallest; a line between logarithms; the rate of the largest.
    [(0, 2.0), (100, 2.0), (200, 8**0.5), (400, 4.0), (800, 12.0), (1600, 24.0)],
)
def test_a_curve_is_read_between_its_points(size: float, seconds: float) -> None:
    assert seconds_of(CURVE, size) == pytest.approx(seconds)


def test_more_ranks_than_were_measured_share_the_cores() -> None:
    two, four = linear_ranks(threads=2), linear_ranks(threads=1)
    node = MeasuredNode(cores=2, ranks={2: two, 4: four})
    assert node.of(1) == (two, 1.0)
    assert node.of(3) == (four, 1.0)
    assert node.of(8) == (four, 2.0)


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"operations": {"matmul": [[1, 1.0]]}}, "operations", "thin-matmul"),
        ({"operations": {**OTHERS, "tensor": [[1, 1.0]]}}, "operations", "tensor"),
        ({"operations": {**OTHERS, "matmul": []}}, "operations.matmul", "at least 1"),
        ({"operations": {**OTHERS, "matmul": [[2, 1.0], [1, 2.0]]}}, "operations.matmul", "must rise"),
        ({"operations": {**OTHERS, "matmul": [[1, 2.0], [2, 1.0]]}}, "operations.matmul", "must not fall"),
        ({"operations": {**OTHERS, "matmul": [[1, -1.0]]}}, "operations.matmul", "greater than 0"),
        ({"overlap": 1.5}, "overlap", "less than or equal to 1"),
        ({"threads": 0}, "threads", "greater than or equal to 1"),
        ({"forward_seconds": None}, "forward_seconds", "lacks"),
        ({"skew": -0.1}, "skew", "greater than or equal to 0"),
        ({"clock": 3.0}, "clock", "not permitted"),
    ],
)  # fmt: skip
def test_a_measurement_that_cannot_be_used_is_named(changed: dict[str, Any], field: str, text: str) -> None:
    ranks = {**linear_ranks().model_dump(), **changed}
    ranks = {name: value for name, value in ranks.items() if value is not None}
    values = load_profile("CPU").model_dump()
    values["measured"] = {"cores": 2, "ranks": {2: ranks}}
    with pytest.raises(UserError, match=text) as caught:
        parse_profile(values, "mine.yaml")
    assert caught.value.field is not None
    assert field in caught.value.field


def test_a_node_has_ranks() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MeasuredNode(cores=2, ranks={})


def test_all_fields_of_ranks_have_defaults_but_what_operations_take() -> None:
    needed = {name for name, info in MeasuredRanks.model_fields.items() if info.is_required()}
    assert needed == {"threads", "operations", "forward_seconds", "backward_seconds", "update_seconds"}
