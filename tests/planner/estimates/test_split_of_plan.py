"""`split_of` reads from a plan the split whose configuration the plan was resolved from."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.config import load
from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.estimates.configuration import split_fields
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.split_of_plan import split_of
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog

_SPLITS = (
    Split(ParallelDims(), "serial", micro_batch=8, optimizer="sgd"),
    Split(ParallelDims(data=4), "pytorch-ddp", micro_batch=2, num_micro_batches=3),
    Split(ParallelDims(data=2), "pytorch-ddp", micro_batch=2, codec="int8"),
    Split(ParallelDims(data=2, shard=4), "fsdp", precision="bf16", activation_checkpointing=True),
    Split(ParallelDims(data=4), "deepspeed", zero_stage=3, num_micro_batches=2),
    Split(ParallelDims(data=4), "deepspeed", zero_stage=1, offload=True),
    Split(ParallelDims(data=2, tensor=2), "pytorch-ddp", micro_batch=2, num_micro_batches=2),
    Split(ParallelDims(pipeline=2, data=2), "pytorch-ddp", num_micro_batches=4, schedule="gpipe"),
    Split(ParallelDims(shard=2, context=2), "fsdp", micro_batch=2, num_micro_batches=2),
    Split(ParallelDims(shard=4, expert=2), "fsdp"),
)


def _plan(**fields: Any) -> RunPlan:
    return resolve(load(overrides=fields), get_catalog(), Facts(), Resources(num_gpus=8))


@pytest.mark.parametrize("split", _SPLITS, ids=lambda s: f"{s.backend}: {s.dims}")
def test_round_trip(split: Split) -> None:
    fields = {**split_fields(split, "cuda"), "optimizer": split.optimizer}
    assert split_of(_plan(**fields)) == split


def test_the_default_stage_of_zero_is_that_of_the_backend() -> None:
    assert split_of(_plan(backend="deepspeed", num_gpus=2)).zero_stage == 2


def test_pieces_of_a_pipeline_are_its_micro_batches() -> None:
    fields = {"backend": "pytorch-ddp", "num_gpus": 2, "batch_size": 8, "parallel.pipeline": 2}
    split = split_of(_plan(**fields, **{"parallel.num_microbatches": 4}))
    assert (split.micro_batch, split.num_micro_batches) == (2, 4)


def test_offloading_changes_nothing_on_a_cpu() -> None:
    assert not split_of(_plan(num_processes=2, device="cpu", optimizer_offload=True)).offload


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("activation_checkpointing", {"activation_checkpointing": "offload"}),
        ("compile", {"compile": "blocks"}),
        ("gradient_as_bucket_view", {"gradient_as_bucket_view": False}),
        ("sync_batchnorm", {"sync_batchnorm": True}),
        ("fsdp.reshard_after_forward", {"backend": "fsdp", "fsdp.reshard_after_forward": False}),
        (
            "zero.offload_parameters",
            {"backend": "deepspeed", "zero_stage": 3, "zero.offload_parameters": "cpu"},
        ),
        ("low_communication.mode", {"low_communication.mode": "local-sgd", "low_communication.period": 2}),
    ],
)
def test_settings_that_are_not_predicted_are_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        split_of(_plan(num_gpus=2, **fields))
    assert raised.value.field == field


def test_more_stages_than_usual_are_not_predicted() -> None:
    fields = {"backend": "pytorch-ddp", "num_gpus": 2, "batch_size": 8, "parallel.pipeline": 2}
    looped = {**fields, "parallel.schedule": "interleaved-1f1b"}
    assert split_of(_plan(**looped)).schedule == "interleaved-1f1b"
    with pytest.raises(UserError) as raised:
        split_of(_plan(**looped, **{"parallel.stages": tuple("abcdef")}))
    assert (raised.value.field, raised.value.got) == ("parallel.stages", "6 names")
