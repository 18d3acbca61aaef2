"""Memory by a formula from numbers is near to that from recorded facts."""

from __future__ import annotations

import pytest

from distributed.planner.estimates import memory_by_numbers
from distributed.planner.estimates.memory_by_numbers import SPREAD
from tests.benchmarks.planner_numbers_memory import compared

AXES = ("data", "shard")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_formula_from_numbers_is_near_to_facts(precision: str) -> None:
    errors = {str(split): error for split, error in compared("narrow", precision, AXES)}
    assert len(errors) > 30
    assert {name: error for name, error in errors.items() if abs(error) > SPREAD / 2} == {}


@pytest.mark.parametrize("part", ["_gradients", "_activations", "_weights"])
def test_a_formula_without_a_part_is_not(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants."""
    monkeypatch.setattr(memory_by_numbers, part, lambda *given: memory_by_numbers._Moments())
    errors = [error for _, error in compared("narrow", "no", AXES)]
    assert max(map(abs, errors)) > SPREAD
