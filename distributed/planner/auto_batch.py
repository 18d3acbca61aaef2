"""``batch_size=auto``: the sizes of a micro-batch from which a run may choose, with the same training."""

from __future__ import annotations

from dataclasses import replace

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.plan import BatchPlan, Facts, RunPlan
from distributed.planner.pipeline import pipeline_shape

__all__ = ["auto_sizes", "check_auto", "most_divided", "smaller_sizes", "with_micro_batch"]


def check_auto(config: DistributedConfig, facts: Facts) -> None:
    """Check that ``batch_size=auto`` has something to choose, and may choose it.

    Raises:
        UserError: there is no `global_batch_size`, or another setting fixes the micro-batch.
    """
    if config.global_batch_size is None:
        raise UserError(
            "batch_size=auto chooses the micro-batch of a fixed global batch, and there is none",
            field="global_batch_size",
            allowed="the number of samples per optimizer step",
            remedy="Set global_batch_size, or batch_size to a number",
        )
    if config.gradient_accumulation_steps is not None:
        raise UserError(
            "batch_size=auto chooses the number of micro-batches as well, and this setting fixes it",
            field="gradient_accumulation_steps",
            got=config.gradient_accumulation_steps,
            allowed="nothing with batch_size=auto",
            remedy="Leave it out, or leave batch_size out to derive it from global_batch_size",
        )
    if facts.has_batches:
        raise UserError(
            "batch_size=auto chooses the micro-batch, and those of a batch sampler stay whole",
            field="batch_size",
            got="auto, and a DataLoader with a batch sampler",
            allowed="auto with a sampler, or without one",
            remedy="Give the DataLoader a sampler instead, or leave batch_size out",
        )


def auto_sizes(
    config: DistributedConfig, spec: BackendSpec, dims: ParallelDims, num_slices: int
) -> tuple[int, ...]:
    """Sizes of a micro-batch that divide the share of a rank, so that accumulation is exact, and that the
    backend and the schedule of a pipeline accept; largest first.

    Args:
        num_slices: into how many slices a global batch is cut.

    Raises:
        UserError: the slices are not equal, or there is no such size.
    """
    assert config.global_batch_size is not None
    share, left = divmod(config.global_batch_size, num_slices)
    if left or not share:
        low = config.global_batch_size - left
        raise UserError(
            f"{num_slices} ranks with different samples cannot have equal shares of it",
            field="global_batch_size",
            got=config.global_batch_size,
            allowed=f"a multiple of {num_slices}; nearest: "
            + (f"{low} or {low + num_slices}" if low else str(num_slices)),
        )
    found, refusal = _accepted(config, spec, dims, share, num_slices)
    if not found:
        assert refusal is not None
        raise refusal
    return tuple(found)


def smaller_sizes(plan: RunPlan) -> list[int]:
    """Sizes of a micro-batch below that of `plan` that are accepted for the same share of a rank, largest
    first."""
    batch = plan.batch
    share = batch.batch_size * batch.gradient_accumulation_steps
    found, _ = _accepted(plan.config, plan.spec, plan.dims, share, batch.data_parallel_size)
    return [size for size in found if size < batch.batch_size]


def _accepted(
    config: DistributedConfig, spec: BackendSpec, dims: ParallelDims, share: int, num_slices: int
) -> tuple[list[int], UserError | None]:
    """Sizes that divide `share` and are accepted, largest first, and the first refusal."""
    found, refusal = list[int](), None
    for size in range(share, 0, -1):
        if share % size or (size < share and not spec.capabilities.accumulation):
            continue
        try:
            if dims.pipeline > 1:
                pipeline_shape(config, dims, BatchPlan(size, share // size, num_slices))
            found.append(size)
        except UserError as error:
            refusal = refusal or error
    return found, refusal


def most_divided(batch: BatchPlan) -> BatchPlan:
    """The same global batch in micro-batches of one sample. Under ``batch_size=auto``, models and losses are
    checked for these, so that what is refused does not depend on the memory that there is."""
    share = batch.global_batch_size // batch.data_parallel_size
    return BatchPlan(1, share, batch.data_parallel_size)


def with_micro_batch(plan: RunPlan, size: int, note: str = "") -> RunPlan:
    """`plan` with micro-batches of `size` samples and the same global batch.

    Args:
        note: why that size, for the first lines of the run.
    """
    before = plan.batch
    share = before.global_batch_size // before.data_parallel_size
    follows = plan.val_batch_size == before.batch_size
    return replace(
        plan,
        batch=BatchPlan(size, share // size, before.data_parallel_size),
        val_batch_size=size if follows else plan.val_batch_size,
        micro_batches=(),
        notes=(*plan.notes, *([note] if note else [])),
    )
