"""The batch identity (C1): kept exactly, derived where one number is free, else an error."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distributed.errors import UserError
from distributed.interfaces.plan import BatchPlan
from distributed.planner.batch import resolve_batch

number = st.integers(1, 24)
quick = settings(deadline=None, max_examples=100, derandomize=True)


def resolve(ranks: int = 1, **given: int | None) -> BatchPlan:
    known: dict[str, Any] = {"batch_size": None, "accumulation": None, "global_batch_size": None,
                             "loader_batch_size": None, **given}  # fmt: skip
    return resolve_batch(data_parallel_size=ranks, **known)


def numbers(plan: BatchPlan) -> tuple[int, int, int, int]:
    return (plan.batch_size, plan.gradient_accumulation_steps, plan.data_parallel_size,
            plan.global_batch_size)  # fmt: skip


@quick
@given(number, number, number)
def test_any_one_of_them_follows_from_the_others(batch: int, steps: int, ranks: int) -> None:
    whole = batch * steps * ranks
    expected = (batch, steps, ranks, whole)
    assert numbers(resolve(ranks, batch_size=batch, accumulation=steps)) == expected
    assert numbers(resolve(ranks, batch_size=batch, global_batch_size=whole)) == expected
    assert numbers(resolve(ranks, accumulation=steps, global_batch_size=whole)) == expected
    assert numbers(resolve(ranks, batch_size=batch, accumulation=steps, global_batch_size=whole)) == expected
    assert numbers(resolve(ranks, loader_batch_size=batch, accumulation=steps)) == expected
    assert (
        numbers(resolve(ranks, loader_batch_size=batch, has_batches=True, global_batch_size=whole))
        == expected
    )
    if batch > 1:
        assert numbers(resolve(ranks, loader_batch_size=batch, global_batch_size=whole)) == expected


@pytest.mark.parametrize(
    ("ranks", "loader", "whole", "expected"),
    [
        (1, 64, 64, (64, 1)),
        (2, 64, 64, (32, 1)),
        (4, 64, 64, (16, 1)),
        (1, 16, 64, (16, 4)),
        (1, 1, 64, (64, 1)),
        (2, 1, 64, (32, 1)),
        (1, 24, 60, (20, 3)),
        (1, 4, 7, (1, 7)),
    ],
)
def test_a_loaders_size_is_the_largest_micro_batch(
    ranks: int, loader: int, whole: int, expected: tuple[int, int]
) -> None:
    found = resolve(ranks, loader_batch_size=loader, global_batch_size=whole)
    assert numbers(found) == (*expected, ranks, whole)
    size, steps = expected
    for named in ({"accumulation": steps}, {"batch_size": size}):
        assert resolve(ranks, loader_batch_size=loader, global_batch_size=whole, **named) == found


@quick
@given(number, number, number)
def test_accumulation_is_the_least_that_a_loaders_size_allows(share: int, loader: int, ranks: int) -> None:
    assume(loader > 1)
    found = resolve(ranks, loader_batch_size=loader, global_batch_size=share * ranks)
    fitting = [n for n in range(1, share + 1) if share % n == 0 and share // n <= loader]
    assert numbers(found) == (share // fitting[0], fitting[0], ranks, share * ranks)


def test_what_nobody_says() -> None:
    assert numbers(resolve(3)) == (32, 1, 3, 96)
    assert numbers(resolve(3, loader_batch_size=5)) == (5, 1, 3, 15)
    assert numbers(resolve(3, global_batch_size=12)) == (4, 1, 3, 12)
    assert numbers(resolve(3, accumulation=2)) == (32, 2, 3, 192)


@quick
@given(number, number, number)
def test_an_impossible_identity_names_the_nearest_that_hold(whole: int, unit: int, ranks: int) -> None:
    assume(whole % (unit * ranks))
    for given_unit in ({"batch_size": unit}, {"accumulation": unit}):
        with pytest.raises(UserError) as caught:
            resolve(ranks, global_batch_size=whole, **given_unit)
        assert caught.value.field == "global_batch_size"
        nearest = [int(n) for n in re.findall(r"\d+", str(caught.value.allowed).split("nearest: ")[1])]
        step = unit * ranks
        assert nearest == [n for n in (whole // step * step, (whole // step + 1) * step) if n]
        for possible in nearest:
            assert resolve(ranks, global_batch_size=possible, **given_unit).global_batch_size == possible


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        ({"batch_size": 4, "accumulation": 2, "global_batch_size": 24}, "global_batch_size", "16"),
        ({"batch_size": 4, "loader_batch_size": 8}, "batch_size", "8, the loader's own"),
        (
            {"batch_size": 4, "loader_batch_size": 8, "has_batches": True, "global_batch_size": 16},
            "batch_size",
            "8, the loader's own",
        ),
    ],
)
def test_explicit_values_that_conflict(given: dict[str, int], field: str, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(2, **given)
    assert (caught.value.field, caught.value.allowed) == (field, allowed)


def test_it_is_said_in_words() -> None:
    assert str(BatchPlan(4, 2, 3)) == "global batch 24 = 4 samples x 2 accumulated x 3 ranks"
    assert str(BatchPlan(4, 1, 1)) == "global batch 4 = 4 samples x 1 rank"
    assert BatchPlan(4, 2, 3).as_dict() == {
        "batch_size": 4, "gradient_accumulation_steps": 2, "data_parallel_size": 3, "global_batch_size": 24,
    }  # fmt: skip
