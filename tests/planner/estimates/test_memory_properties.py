"""What must hold for predictions of memory of all models."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distributed.planner.estimates.layouts import predicted_backends
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.model_facts import (
    ModelFacts,
)
from distributed.planner.estimates.split import Split
from tests.planner.estimates.hand_facts import (
    ADAM,
    GLOO,
    PLAIN,
    chain,
    piped,
    split,
    stages,
)


def random_chain(draw: random.Random, unit: int = 1) -> ModelFacts:
    """A chain of blocks; the rows of each weight are a multiple of `unit`."""
    number = draw.randint(1, 6)
    rows = [unit * draw.randint(1, 50) for _ in range(number)]
    saved = [draw.randint(0, 4000) for _ in range(number)]
    return chain(rows, saved, draw.choice((PLAIN, ADAM)), draw.randint(0, 1000))


def random_split(draw: random.Random) -> Split:
    backend = draw.choice(predicted_backends())
    ranks = 1 if backend == "serial" else draw.choice((2, 3, 4, 8))
    stage = draw.choice((0, 1, 2, 3)) if backend == "deepspeed" else 0
    return split(backend, ranks, zero_stage=stage, num_micro_batches=draw.choice((1, 2, 5)))


@pytest.mark.parametrize(("backend", "stage"), [("fsdp", 0), ("deepspeed", 1), ("deepspeed", 2)])
def test_more_ranks_never_raise_the_memory_of_a_shard(backend: str, stage: int) -> None:
    """Where the number of ranks divides the rows, so that no shard is padded."""
    draw = random.Random(stage)
    for _ in range(100):
        facts = random_chain(draw, unit=64)
        micro = draw.choice((1, 3))
        totals = [
            predict_memory(facts, split(backend, n, zero_stage=stage, num_micro_batches=micro), GLOO).total
            for n in (2, 4, 8, 16, 32)
        ]
        assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_of_zero_never_raise_memory_of_large_weights(stage: int) -> None:
    """Weights of more elements than ZeRO 3 keeps gathered, which the number of ranks divides."""
    facts = chain([102_400, 204_800], [100, 3000], ADAM)
    totals = [
        predict_memory(facts, split("deepspeed", n, zero_stage=stage), GLOO).total for n in (2, 4, 8, 16)
    ]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_more_micro_batches_under_way_need_no_less(schedule: str) -> None:
    given = piped(schedule)
    totals = [
        predict_memory(stages(True, True), replace(given, num_micro_batches=n)).total
        for n in (2, 3, 4, 8, 16)
    ]
    assert totals == sorted(totals)
    one_by_one = predict_memory(stages(), piped("1f1b")).total
    assert one_by_one <= predict_memory(stages(), piped("gpipe")).total


def test_a_larger_micro_batch_needs_no_less() -> None:
    draw = random.Random(1)
    for _ in range(100):
        facts, given = random_chain(draw), random_split(draw)
        larger = Split(**{**vars(given), "micro_batch": given.micro_batch + draw.randint(1, 5)})
        assert predict_memory(facts, larger).total >= predict_memory(facts, given).total


def test_the_peak_does_not_depend_on_how_many_micro_batches_follow_the_third() -> None:
    draw = random.Random(2)
    for _ in range(100):
        facts, given = random_chain(draw), random_split(draw)
        three, many = (Split(**{**vars(given), "num_micro_batches": n}) for n in (3, 64))
        assert predict_memory(facts, three) == predict_memory(facts, many)
