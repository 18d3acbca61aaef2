"""The sizes of the mesh's axes: what is derived, what is refused, and where each rank lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from distributed import UserError
from distributed.config import load
from distributed.interfaces.parallel_dims import AXES, EXPERT_AXES, ParallelDims
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import rescale, resolve
from distributed.registry.catalog import get_catalog


def plan(backend: str, ranks: int, fields: Mapping[str, Any] | None = None, **parallel: Any) -> RunPlan:
    given = {f"parallel.{axis}": size for axis, size in parallel.items()}
    config = load(overrides={"backend": backend, "num_processes": ranks, **given, **(fields or {})})
    return resolve(config, get_catalog(), Facts(), Resources())


@pytest.mark.parametrize(
    ("backend", "ranks", "parallel", "sizes"),
    [
        ("pytorch-ddp", 4, {}, {"data": 4}),
        ("pytorch-ddp", 4, {"tensor": 2}, {"data": 2, "tensor": 2}),
        ("pytorch-ddp", 4, {"tensor": 4}, {"tensor": 4}),
        ("pytorch-ddp", 8, {"tensor": 2, "expert": 2}, {"data": 4, "tensor": 2, "expert": 2}),
        ("fsdp", 8, {}, {"shard": 8}),
        ("fsdp", 8, {"tensor": 2}, {"shard": 4, "tensor": 2}),
        ("fsdp", 8, {"tensor": 2, "data": 2}, {"data": 2, "shard": 2, "tensor": 2}),
        ("fsdp", 8, {"fsdp.replicate": 4}, {"data": 4, "shard": 2}),
        ("horovod", 3, {"data": 3}, {"data": 3}),
        ("pytorch-ddp", 8, {"context": 2, "pipeline": 2}, {"data": 2, "context": 2, "pipeline": 2}),
        ("fsdp", 8, {"context": 2, "expert": 2}, {"shard": 4, "context": 2, "expert": 2}),
    ],
)
def test_an_axis_that_is_not_given_takes_the_remaining_ranks(
    backend: str, ranks: int, parallel: dict[str, int], sizes: dict[str, int]
) -> None:
    if backend == "horovod":
        pytest.importorskip("horovod")
    own = {name: parallel.pop(name) for name in list(parallel) if "." in name}
    made = plan(backend, ranks, {**own, "global_batch_size": 48}, **parallel)
    assert made.dims == ParallelDims(**sizes)
    assert made.batch.data_parallel_size == sizes.get("data", 1) * sizes.get("shard", 1)
    assert made.batch.global_batch_size == 48


@pytest.mark.parametrize(
    ("backend", "ranks", "parallel", "field", "allowed"),
    [
        ("pytorch-ddp", 4, {"tensor": 3}, "parallel.tensor", "1, 2, 4"),
        ("pytorch-ddp", 6, {"data": 2, "tensor": 2}, "parallel.data", "3"),
        ("pytorch-ddp", 6, {"data": 4, "tensor": 2}, "parallel.data", "3"),
        ("fsdp", 4, {"fsdp.replicate": 3}, "fsdp.replicate", "1, 2, 4"),
        ("fsdp", 4, {"data": 2, "shard": 4}, "parallel.data", "1"),
        ("pytorch-ddp", 4, {"shard": 2}, "parallel.shard", "1"),
        ("deepspeed", 4, {"tensor": 2}, "parallel.tensor", "1"),
        ("pytorch-ddp", 4, {"pipeline": 3}, "parallel.pipeline", "1, 2, 4"),
        ("horovod", 4, {"pipeline": 2}, "parallel.pipeline", "1"),
        ("deepspeed", 4, {"context": 2}, "parallel.context", "1"),
        ("pytorch-ddp", 4, {"context": 2, "pipeline": 4}, "parallel.pipeline", "1, 2"),
        ("pytorch-ddp", 4, {"context": 2, "expert": 4}, "parallel.expert", "1, 2"),
        ("horovod", 4, {"expert": 2}, "parallel.expert", "1"),
        ("pytorch-ddp", 6, {"expert": 4}, "parallel.expert", "1, 2, 3, 6"),
        ("pytorch-ddp", 4, {"expert": 4, "tensor": 2}, "parallel.expert", "1, 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(
    backend: str, ranks: int, parallel: dict[str, int], field: str, allowed: str
) -> None:
    if backend in ("deepspeed", "horovod"):
        pytest.importorskip(backend)
    own = {name: parallel.pop(name) for name in list(parallel) if "." in name}
    with pytest.raises(UserError) as caught:
        plan(backend, ranks, own, **parallel)
    assert caught.value.field == field
    assert caught.value.allowed == allowed


def test_two_fields_for_one_axis_are_refused() -> None:
    with pytest.raises(UserError, match=r"fsdp\.replicate and parallel\.data"):
        plan("fsdp", 4, {"fsdp.replicate": 2}, data=2)


@pytest.mark.parametrize(
    "field", ["schedule=gpipe", "num_microbatches=4", "stages=[a]", "context_attention=ring"]
)
def test_a_field_of_an_axis_with_one_rank_is_refused(field: str) -> None:
    name, _, value = field.partition("=")
    with pytest.raises(UserError, match=f"{name} has no meaning with"):
        plan("pytorch-ddp", 2, **{name: [value[1:-1]] if "[" in value else value})


def test_another_number_of_ranks_changes_the_data_axis_alone() -> None:
    started = plan("pytorch-ddp", 8, {"global_batch_size": 16}, tensor=2)
    fewer = rescale(started, 1, 6 - 2)
    assert fewer.dims == ParallelDims(data=2, tensor=2)
    assert fewer.batch.global_batch_size == 16
    with pytest.raises(UserError, match="5 ranks cannot be divided into tensor 2"):
        rescale(started, 1, 5)


def test_coordinates_number_the_tensor_axis_fastest() -> None:
    dims = ParallelDims(pipeline=2, data=3, shard=2, tensor=4)
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    assert [tuple(p[axis] for axis in AXES) for p in places] == [
        (p, d, s, 0, t) for p in range(2) for d in range(3) for s in range(2) for t in range(4)
    ]
    assert [dims.index(rank, "data", "shard") for rank in (0, 3, 4, 8, 47)] == [0, 0, 1, 2, 5]


def test_experts_lie_within_the_ranks_with_different_samples() -> None:
    dims = ParallelDims(data=2, shard=2, tensor=2, expert=2)
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    assert [p["expert"] for p in places] == [0, 0, 1, 1] * 2
    assert [p["expert_data"] for p in places] == [0] * 4 + [1] * 4
    assert dims.size("expert_data") == 2
    assert [dims.index(rank, *(a for a in EXPERT_AXES if a != "expert")) for rank in (0, 1, 2, 4, 7)] == [
        *(0, 1, 0, 2, 3)
    ]


def test_another_number_of_ranks_still_divides_the_experts() -> None:
    started = plan("pytorch-ddp", 8, {"global_batch_size": 24}, expert=4)
    assert rescale(started, 1, 4).dims == ParallelDims(data=4, expert=4)
    with pytest.raises(UserError, match="6 data-parallel ranks"):
        rescale(started, 1, 6)


def test_the_first_line_shows_the_mesh() -> None:
    """Unless it has one axis, the backend's own."""
    for backend, axes, shown in (
        ("pytorch-ddp", {"tensor": 2}, " (data 2 x tensor 2)"),
        ("pytorch-ddp", {"expert": 2}, " (data 4, expert 2)"),
        ("fsdp", {"data": 2}, " (data 2 x shard 2)"),
        ("fsdp", {}, ""),
        ("pytorch-ddp", {}, ""),
    ):
        assert plan(backend, 4, **axes).summary().startswith(f"{backend}: 4 ranks{shown} on CPU")


@pytest.mark.parametrize("fields", [{"optimizer_bits": 8}, {"matmul_precision": "fp8"}])
def test_what_needs_whole_weights_is_refused_with_a_tensor_axis(fields: dict[str, Any]) -> None:
    pytest.importorskip("torchao")
    for axis in ("tensor", "expert"):
        with pytest.raises(UserError, match=rf"parallel\.{axis}=2 cuts layers"):
            plan("pytorch-ddp", 2, fields, **{axis: 2})


def test_compiled_experts_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"parallel\.expert=2 cuts layers of experts: the number of tokens"
    ) as caught:
        plan("pytorch-ddp", 2, {"compile": "blocks"}, expert=2)
    assert (caught.value.field, caught.value.allowed) == ("compile", "none")
    assert plan("pytorch-ddp", 2, {"compile": "blocks"}, tensor=2).dims.tensor == 2
