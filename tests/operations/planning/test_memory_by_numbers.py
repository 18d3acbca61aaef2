"""Memory by a formula from numbers is near to that from recorded facts."""

from __future__ import annotations

import pytest

from distributed.planner.estimates import memory_by_numbers
from tests.benchmarks.planner_numbers_memory import compared

AXES = ("data", "shard")
WITHIN = 1.25
"""Factor between both. Of pipelines it is larger: `memory_by_numbers.SPREAD`."""


def factors(name: str, precision: str) -> dict[str, float]:
    """Split -> how many times larger one of the two predictions is."""
    found = compared(name, precision, AXES)
    return {str(split): max(1.0 + error, 1.0 / (1.0 + error)) for split, error in found}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_a_formula_from_numbers_is_near_to_facts(name: str, precision: str) -> None:
    """Logits are most of the first decoder's memory, weights of the second one's."""
    found = factors(name, precision)
    assert len(found) > 30
    assert {split: factor for split, factor in found.items() if factor > WITHIN} == {}


@pytest.mark.parametrize("part", ["_weights", "_gradients", "_optimizer", "_activations", "_staging"])
def test_a_formula_without_a_part_is_not(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants."""
    monkeypatch.setattr(memory_by_numbers, part, lambda *given, **more: memory_by_numbers._Moments())
    name = "narrow" if part == "_activations" else "wide"
    assert max(factors(name, "no").values()) > WITHIN
