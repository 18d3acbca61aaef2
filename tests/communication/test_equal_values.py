"""Comparing a value over the ranks: exact, and without a message that grows with their number."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distributed.communication.equal_values import (
    are_equal,
    differences,
    digest_of,
    equality_terms,
    have_equal,
)
from tests.campaigns.thread_ranks import Meeting, ThreadRank, on_ranks


def summed(values: list[float]) -> list[float]:
    return [sum(terms) for terms in zip(*map(equality_terms, values), strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 16384])
@pytest.mark.parametrize("value", [0.0, 1.0, float(2**52 - 1), -1.5, float("nan"), float("inf")])
def test_equal_values_are_equal_and_one_other_is_not(value: float, size: int) -> None:
    own = equality_terms(value)
    assert are_equal([size * term for term in own], size)
    if size > 1:
        for other in (value + 1 if value < 1e9 else 0.0, 1e-300, -0.0 if value else 5e-324):
            odd = [(size - 1) * term + more for term, more in zip(own, equality_terms(other), strict=True)]
            assert not are_equal(odd, size), other


def test_no_mixture_of_values_passes() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        values = [float(draw.choice([3, 5, 7, 2**40, 2**51 + 1])) for _ in range(draw.randint(2, 9))]
        assert are_equal(summed(values), len(values)) == (len(set(values)) == 1), values


class CountedRank(ThreadRank):
    """Counts the calls of its collectives."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self.calls: list[str] = []

    def all_reduce(self, values: Any) -> list[float]:
        self.calls.append("all_reduce")
        return super().all_reduce(values)

    def gather_objects(self, value: Any) -> list[Any]:
        self.calls.append("gather")
        return super().gather_objects(value)


def test_equal_ranks_gather_nothing_and_each_other_value_comes_once() -> None:
    def compare(rank: int, meeting: Meeting, values: list[Any]) -> Any:
        own = CountedRank(rank, meeting)
        return list(differences(own, values[rank])), own.calls[0], own.calls.count("gather")

    equal = on_ranks(5, lambda rank, meeting: compare(rank, meeting, [{"a": 1}] * 5))
    # `ThreadRank` sums what it gathers.
    assert equal == [([], "all_reduce", 1)] * 5
    values = ["zero", "zero", "two", "zero", "four"]
    found = on_ranks(5, lambda rank, meeting: compare(rank, meeting, values))
    assert [result[0] for result in found] == [[(2, "zero", "two"), (4, "zero", "four")]] * 5


def test_a_single_rank_asks_nobody() -> None:
    rank = CountedRank(0, Meeting(1))
    assert have_equal(rank, "value")
    assert rank.calls == []
    assert digest_of("value") < 2**52
