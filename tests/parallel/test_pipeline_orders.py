"""Orders of pipelines take the time that their formulas state."""

from __future__ import annotations

import itertools
import random

import pytest

from distributed.errors import UserError
from distributed.interfaces.backend_spec import SCHEDULES
from distributed.parallel.pipeline_balance import balance
from distributed.parallel.pipeline_orders import Action, bubble_of, order_of, simulate
from distributed.planner.pipeline import plain_shape
from distributed.planner.stage_order import LOOPED, ONE_STAGE, SPLIT, rank_order

SIZES = [(2, 8), (4, 8), (4, 16), (2, 4), (3, 6)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_simulated_bubble_is_that_of_the_formula(schedule: str, ranks: int, micro_batches: int) -> None:
    """Exactly, with one unit for forward and for each half of backward."""
    shape = plain_shape(schedule, ranks, micro_batches)
    order = order_of(shape)
    computed = [action for actions in order.values() for action in actions]
    assert len(computed) == len(set(computed))
    assert {a for a in computed if a.kind == "F"} == {
        Action("F", s, m) for s in range(shape.num_stages) for m in range(micro_batches)
    }
    assert bubble_of(simulate(order, shape)) == pytest.approx(shape.bubble, abs=1e-12)


@pytest.mark.parametrize("schedule", [*ONE_STAGE, *LOOPED, *SPLIT])
def test_the_order_that_predictions_play_is_that_of_the_schedule(schedule: str) -> None:
    """Which the planner has without torch."""
    for ranks, micro_batches in itertools.product((2, 3, 4), range(1, 13)):
        try:
            shape = plain_shape(schedule, ranks, micro_batches)
        except UserError:
            continue
        for rank, own in order_of(shape).items():
            assert list(map(tuple, own)) == list(rank_order(schedule, ranks, micro_batches, rank))


def test_an_order_that_waits_for_itself_is_no_order() -> None:
    shape = plain_shape("gpipe", 2, 1)
    order = {0: [Action("B", 0, 0), Action("F", 0, 0)], 1: [Action("F", 1, 0), Action("B", 1, 0)]}
    with pytest.raises(ValueError, match="no rank can go on"):
        simulate(order, shape)


def test_stages_are_balanced_as_well_as_any_cut_could() -> None:
    draw = random.Random(0)
    for _ in range(200):
        count, parts = draw.randint(1, 9), draw.randint(1, 4)
        costs = [draw.choice([0.0, 1.0, 2.5, 7.0]) for _ in range(count)]
        before, after = draw.choice([0.0, 3.0]), draw.choice([0.0, 5.0])
        if parts > count:
            with pytest.raises(ValueError, match="cannot be cut"):
                balance(costs, parts, before, after)
            continue

        def largest(starts: tuple[int, ...], costs: list[float], before: float, after: float) -> float:
            ends = (*starts[1:], len(costs))
            sums = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
            sums[0] += before
            sums[-1] += after
            return max(sums)

        cuts = itertools.combinations(range(1, count), parts - 1)
        best = min(largest((0, *cut), costs, before, after) for cut in cuts)
        starts, found = balance(costs, parts, before, after)
        assert found == best == largest(tuple(starts), costs, before, after)


def test_a_shape_names_what_it_accepts() -> None:
    with pytest.raises(UserError) as caught:
        plain_shape("1f1b", 4, 3)
    assert caught.value.allowed == "4, 5, 6, 7, 8, 9, 10, 11, ..."
