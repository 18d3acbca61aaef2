"""The sizes of a micro-batch that ``batch_size=auto`` may choose, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.config import load
from distributed.errors import UserError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.auto_batch import with_micro_batch
from distributed.planner.pipeline import pipeline_shape
from distributed.planner.resolve import rescale, resolve
from distributed.registry.catalog import get_catalog


def plan(facts: Facts | None = None, **fields: Any) -> RunPlan:
    fields = {"batch_size": "auto", "device": "cpu", **fields}
    return resolve(load(overrides=fields), get_catalog(), facts or Facts(), Resources())


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 4))
def test_sizes_divide_the_share_of_a_rank(share: int, ranks: int) -> None:
    found = plan(num_processes=ranks, global_batch_size=share * ranks)
    assert found.micro_batches == tuple(n for n in range(share, 0, -1) if share % n == 0)
    for size in found.micro_batches:
        chosen = with_micro_batch(found, size, "because")
        assert chosen.batch.global_batch_size == share * ranks
        assert (chosen.batch.batch_size, chosen.val_batch_size, chosen.micro_batches) == (size, size, ())
        assert chosen.notes[-1] == "because"


def test_the_validation_loader_keeps_its_own_size() -> None:
    found = plan(Facts(val_batch_size=5), global_batch_size=8)
    assert with_micro_batch(found, 2).val_batch_size == 5


def test_sizes_are_those_that_a_pipeline_accepts() -> None:
    found = plan(
        num_processes=4, global_batch_size=12, **{"parallel.pipeline": 4, "parallel.num_microbatches": 2}
    )
    assert found.micro_batches == (6, 4, 2)  # 4 pieces or more in a step, two of each micro-batch
    for size in found.micro_batches:
        chosen = with_micro_batch(found, size)
        assert pipeline_shape(chosen.config, chosen.dims, chosen.batch).num_microbatches >= 4


def test_another_number_of_ranks_chooses_again_and_keeps_the_global_batch() -> None:
    first = with_micro_batch(plan(num_processes=4, global_batch_size=24), 3)
    other = rescale(first, 1, 2)
    assert other.micro_batches == (12, 6, 4, 3, 2, 1)
    assert (other.batch.batch_size, other.batch.global_batch_size) == (3, 24)
    assert rescale(first, 1, 4).micro_batches == ()


@pytest.mark.parametrize("backend", ["serial", "pytorch-ddp", "fsdp", "deepspeed", "horovod", "ray"])
def test_every_torch_backend_chooses(backend: str) -> None:
    assert plan(backend=backend, num_processes=1, global_batch_size=4).micro_batches == (4, 2, 1)


def test_a_loaders_size_limits_nothing() -> None:
    assert plan(Facts(train_batch_size=2), num_processes=1, global_batch_size=4).micro_batches == (4, 2, 1)


def test_the_first_line_names_the_sizes() -> None:
    text = plan(num_processes=2, global_batch_size=8).summary()
    assert "global batch 8, in micro-batches of one of 4, 2, 1 samples" in text


@pytest.mark.parametrize(
    ("field", "facts", "fields"),
    [
        ("global_batch_size", Facts(), {}),
        ("global_batch_size", Facts(), {"num_processes": 2, "global_batch_size": 9}),
        ("gradient_accumulation_steps", Facts(), {"global_batch_size": 8, "gradient_accumulation_steps": 2}),
        ("batch_size", Facts(has_batches=True), {"global_batch_size": 8}),
        ("batch_size", Facts(), {"global_batch_size": 8, "backend": "tensorflow"}),
    ],
    ids=["no global batch", "unequal shares", "accumulation", "a batch sampler", "tensorflow"],
)
def test_contradictions_are_refused(field: str, facts: Facts, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        plan(facts, **fields)
    assert raised.value.field == field
    assert raised.value.remedy or raised.value.allowed


@pytest.mark.parametrize("value", ["automatic", 0, -1, 2.5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match="a whole number above 0 or auto or nothing"):
        load(overrides={"batch_size": value})
