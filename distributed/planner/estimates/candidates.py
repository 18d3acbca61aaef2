"""Candidates of a search: every split of a model over a number of devices that the backends can train.

What a backend can do comes from its `Capabilities`. A candidate is refused here for the reasons for which a
run would be refused, in the same order: axes, batch, schedule, settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.codec import DENSE, CodecSpec
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.predictions import ModelSizes
from distributed.planner.estimates.split import Split
from distributed.planner.pipeline import ZERO_BUBBLE, plain_shape

__all__ = [
    "Group",
    "NO_MICRO_BATCH",
    "SearchSpace",
    "distinct_backends",
    "groups",
    "indivisible_batch",
    "leaves",
    "micro_batches",
    "refusal",
    "schedule_refusal",
    "sized",
]

_AXES = ("pipeline", "data", "shard", "context", "tensor")

NO_MICRO_BATCH = "no micro-batch of the size that is asked for divides the share of a rank"
"""The reason of splits whose share of the global batch is no multiple of a given micro-batch."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose from. Precision and optimizer change the training, so that they are given.

    Attributes:
        sizes: of the model and its global batch.
        world_size: number of ranks, one for each device.
        backends: the backends to choose from.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: name of the optimizer.
        schedules: orders of a pipeline to choose from.
        checkpointing: values of activation checkpointing to choose from.
        offload: values of optimizer offloading to choose from.
        codecs: names of gradient codecs to choose from. They change gradients: none is tried by default.
        codec_specs: name -> codec.
        largest: axis, or ``micro_batch`` -> the largest size to try; axes that are left out have no limit.
        micro_batch: size of a micro-batch if it is given; None to choose it.
        num_micro_batches: number of micro-batches if it is given; None to choose it.
        admits: whether a way to divide the ranks, with a stage of ZeRO, is a candidate at all.
    """

    sizes: ModelSizes
    world_size: int
    backends: tuple[BackendSpec, ...]
    precision: str = "bf16"
    optimizer: str = "adamw"
    schedules: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
    checkpointing: tuple[bool, ...] = (False, True)
    offload: tuple[bool, ...] = (False,)
    codecs: tuple[str, ...] = (DENSE,)
    codec_specs: Mapping[str, CodecSpec] = field(default_factory=dict, hash=False)
    largest: Mapping[str, int] = field(default_factory=dict, hash=False)
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    admits: Callable[[ParallelDims, int], bool] = lambda dims, zero_stage: True


@dataclass(frozen=True)
class Group:
    """Candidates that divide model and samples over ranks in the same way.

    Attributes:
        spec: the backend.
        zero_stage: stage of ZeRO.
        dims: number of ranks along each axis.
    """

    spec: BackendSpec
    zero_stage: int
    dims: ParallelDims

    def __str__(self) -> str:
        stage = f" zero_stage {self.zero_stage}" if self.zero_stage else ""
        return f"{self.spec.name}{stage}, {self.dims}"


def distinct_backends(specs: Iterable[BackendSpec]) -> tuple[BackendSpec, ...]:
    """Backends for torch that differ in how they divide a model.

    A backend whose axes, ZeRO stages and schedules another one has as well predicts the same times.
    """
    able = [s for s in specs if s.framework == "torch" and s.inner is None and not s.remote]
    able.sort(key=lambda s: (-len(s.capabilities.axes), -len(s.capabilities.zero_stages), s.name))
    kept: list[BackendSpec] = []
    for spec in able:
        if not any(_covers(other, spec) for other in kept):
            kept.append(spec)
    return tuple(kept)


def _covers(wider: BackendSpec, spec: BackendSpec) -> bool:
    one, other = wider.capabilities, spec.capabilities
    # Backends with shards leave copies alone to others.
    axes = set(one.axes) - ({"data"} if "shard" in one.axes else set())
    return set(other.axes) <= axes and other.zero_stages <= one.zero_stages | {0}


def groups(space: SearchSpace) -> Iterator[tuple[Group, str | None]]:
    """Every way to divide the ranks over the axes of the backends, with the reason why it is refused."""
    for spec in space.backends:
        for dims in _dims(space, spec):
            for stage in _stages(spec, dims):
                if space.admits(dims, stage) and not _is_repeated(space, spec, dims, stage):
                    group = Group(spec, stage, dims)
                    yield group, refusal(space, group)


def _is_repeated(space: SearchSpace, spec: BackendSpec, dims: ParallelDims, stage: int) -> bool:
    """Whether a backend that never shards offers the same."""
    axes = {axis for axis in (*_AXES, "expert") if dims.size(axis) > 1}
    if stage or "shard" in axes or not _shards(spec):
        return False
    return any(not _shards(other) and axes <= set(other.capabilities.axes) for other in space.backends)


def _shards(spec: BackendSpec) -> bool:
    return bool(spec.capabilities.zero_stages) or "shard" in spec.capabilities.axes


def _dims(space: SearchSpace, spec: BackendSpec) -> Iterator[ParallelDims]:
    """Factorizations of the ranks over the axes; experts lie within the ranks with different samples."""
    axes = [axis for axis in _AXES if axis in spec.capabilities.axes]
    for sizes in _factorizations(space.world_size, len(axes)):
        dims = ParallelDims(**dict(zip(axes, sizes, strict=True)))
        if any(dims.size(axis) > space.largest.get(axis, dims.size(axis)) for axis in axes):
            continue
        if "shard" in axes and dims.shard == 1 and dims.data > 1:
            continue  # what another backend does with copies alone
        yield dims
        if "expert" in spec.capabilities.axes:
            most = space.largest.get("expert", space.sizes.experts)
            for expert in _divisors(space.sizes.experts)[1:]:
                if dims.data_parallel_size % expert == 0 and expert <= most:
                    yield replace(dims, expert=expert)


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(small + [number // n for n in reversed(small) if n * n != number])


def _stages(spec: BackendSpec, dims: ParallelDims) -> tuple[int, ...]:
    stages = sorted(spec.capabilities.zero_stages)
    return tuple(stages) if stages and dims.data > 1 else (0,)


def refusal(space: SearchSpace, group: Group) -> str | None:
    """Why no candidate of `group` can train; None if one may."""
    sizes, dims, able = space.sizes, group.dims, group.spec.capabilities
    if dims.world_size > 1 and not able.multi_process:
        return "the backend has one rank"
    if space.precision not in able.precisions:
        return f"the backend does not train in {space.precision}"
    if (reason := sizes.indivisible(dims)) is not None:
        return reason
    if dims.pipeline > sizes.layers:
        return f"there are more pipeline ranks than layers={sizes.layers}"
    if sizes.global_batch % dims.data_parallel_size:
        return indivisible_batch(sizes.global_batch)
    return None


def indivisible_batch(global_batch: int) -> str:
    """The reason of a split whose ranks with different samples do not divide the global batch."""
    return f"ranks with different samples do not divide global_batch={global_batch}"


def micro_batches(space: SearchSpace, group: Group) -> tuple[int, ...]:
    """Sizes of a micro-batch, ascending, that divide a rank's share of the global batch."""
    share = space.sizes.global_batch // group.dims.data_parallel_size
    most = space.largest.get("micro_batch", share)
    found = tuple(s for s in _divisors(share) if s <= most and _is_asked(space, s, share // s))
    return found if group.spec.capabilities.accumulation else found[-1:] * (found[-1] == share)


def _is_asked(space: SearchSpace, size: int, number: int) -> bool:
    return space.micro_batch in (None, size) and space.num_micro_batches in (None, number)


def leaves(space: SearchSpace, group: Group) -> Iterator[tuple[Split, str | None]]:
    """Candidates of a group that is not refused, micro-batch 1, with the reason why each is refused."""
    schedules = space.schedules if group.dims.pipeline > 1 else ("1f1b",)
    for schedule in schedules:
        for recompute in space.checkpointing:
            for offload in space.offload:
                for codec in space.codecs:
                    split = Split(
                        group.dims,
                        group.spec.name,
                        zero_stage=group.zero_stage,
                        schedule=schedule,
                        activation_checkpointing=recompute,
                        codec=codec,
                        offload=offload,
                        precision=space.precision,
                        optimizer=space.optimizer,
                    )
                    yield split, _setting_refusal(space, group, split)


def _setting_refusal(space: SearchSpace, group: Group, split: Split) -> str | None:
    able, dims = group.spec.capabilities, group.dims
    if dims.pipeline > 1 and split.schedule not in able.schedules:
        return f"the backend has no schedule {split.schedule}"
    if dims.pipeline > 1 and split.schedule in ZERO_BUBBLE:
        if split.activation_checkpointing:
            return f"{split.schedule} does not compute activations again"
        if dims.shard > 1:
            return f"{split.schedule} does not train with shards"
    if split.activation_checkpointing and "activation_checkpointing" not in able.levers:
        return "the backend has no activation checkpointing"
    if split.offload and (
        "optimizer_offload" not in able.levers or (able.zero_stages and not split.zero_stage)
    ):
        return "the backend does not offload the optimizer here"
    return _codec_refusal(space, group, split) if split.codec != DENSE else None


def _codec_refusal(space: SearchSpace, group: Group, split: Split) -> str | None:
    able, dims = group.spec.capabilities, group.dims
    spec = space.codec_specs.get(split.codec)
    if spec is None or not spec.exchanges <= able.exchanges:
        return f"the backend has no codec {split.codec}"
    if split.zero_stage:
        return "ZeRO sends gradients as they are"
    if "shard" in able.axes and dims.shard > 1 and dims.data * dims.context == 1:
        return "shards have no copies between which a codec could send gradients"
    if space.precision == "fp16" and not (spec.scales and not spec.error_feedback):
        return f"the codec {split.codec} does not send scaled gradients"
    return None


def sized(space: SearchSpace, leaf: Split, sizes: Iterable[int]) -> Iterator[Split]:
    """`leaf` with each size of a micro-batch, and as many micro-batches as the global batch needs."""
    share = space.sizes.global_batch // leaf.dims.data_parallel_size
    for size in sizes:
        yield replace(leaf, micro_batch=size, num_micro_batches=share // size)


@cache
def schedule_refusal(schedule: str, num_ranks: int, num_micro_batches: int, layers: int) -> str | None:
    """Why a pipeline cannot have so many micro-batches, or stages; None if it can."""
    if num_ranks == 1:
        return None
    try:
        shape = plain_shape(schedule, num_ranks, num_micro_batches)
    except UserError as error:
        return error.message
    if shape.num_stages > layers:
        return f"{shape.num_stages} stages are more than layers={layers}"
    return None
