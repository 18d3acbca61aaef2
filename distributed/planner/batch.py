"""The batch identity (C1): never floored, derived where one number is free, else an error."""

from __future__ import annotations

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.plan import BatchPlan, Facts

__all__ = ["check_batches", "rescale_batch", "resolve_batch"]

DEFAULT_BATCH_SIZE = 32


def resolve_batch(
    *,
    batch_size: int | None,
    accumulation: int | None,
    global_batch_size: int | None,
    data_parallel_size: int,
    loader_batch_size: int | None,
    has_batches: bool = False,
) -> BatchPlan:
    """Derive the values that are not explicit.

    Beside a global batch, the size of a DataLoader's batches is the largest micro-batch that is derived. 1 is
    DataLoader's default, and limits nothing.

    Args:
        batch_size: explicit samples per rank and micro-batch, or None.
        accumulation: explicit micro-batches per step, or None.
        global_batch_size: explicit samples per step, or None.
        data_parallel_size: into how many slices, a rank or a group of ranks each, a global
            batch is cut.
        loader_batch_size: the DataLoader's own, or None.
        has_batches: its batches are those of a batch sampler, and stay whole.

    Raises:
        UserError: explicit values contradict each other, with the nearest that do not.
    """
    size = data_parallel_size
    if global_batch_size is not None and batch_size is None and loader_batch_size and not has_batches:
        return _rebatched(global_batch_size, accumulation, size, loader_batch_size)
    if loader_batch_size is not None and (global_batch_size is None or has_batches):
        if batch_size is not None and batch_size != loader_batch_size:
            raise UserError(
                f"the config sets {batch_size} samples per rank and train_loader yields batches of"
                f" {loader_batch_size}",
                field="batch_size",
                got=batch_size,
                allowed=f"{loader_batch_size}, the loader's own",
                remedy="Change one of them, or leave batch_size out to take the loader's",
            )
        batch_size = loader_batch_size
    if global_batch_size is None:
        return BatchPlan(batch_size or DEFAULT_BATCH_SIZE, accumulation or 1, size)
    if batch_size is None:
        return BatchPlan(
            _divide(global_batch_size, (accumulation or 1) * size, "batch_size", accumulation or 1, size),
            accumulation or 1,
            size,
        )
    if accumulation is None:
        return BatchPlan(
            batch_size,
            _divide(global_batch_size, batch_size * size, "gradient_accumulation_steps", batch_size, size),
            size,
        )
    plan = BatchPlan(batch_size, accumulation, size)
    if plan.global_batch_size != global_batch_size:
        raise UserError(
            f"the batch identity does not hold: {batch_size} (batch_size) x {accumulation}"
            f" (gradient_accumulation_steps) x {size} (data_parallel_size) ="
            f" {plan.global_batch_size}, not {global_batch_size}",
            field="global_batch_size",
            got=global_batch_size,
            allowed=str(plan.global_batch_size),
            remedy="Leave one of the three out and it is derived",
        )
    return plan


def _rebatched(total: int, accumulation: int | None, size: int, largest: int) -> BatchPlan:
    """Divide `total` samples over `size` ranks, into micro-batches of at most `largest` where their number is
    free."""
    parts = (accumulation or 1) * size
    share = _divide(total, parts, "batch_size", accumulation or 1, size)
    if accumulation is not None or largest == 1:
        return BatchPlan(share, accumulation or 1, size)
    micro_batch = _largest_divisor(share, largest)
    return BatchPlan(micro_batch, share // micro_batch, size)


def _largest_divisor(share: int, limit: int) -> int:
    return next(size for size in range(min(limit, share), 0, -1) if share % size == 0)


def _divide(total: int, unit: int, derived: str, other: int, size: int) -> int:
    if total % unit == 0:
        return total // unit
    low = total - total % unit
    nearest = f"{low} or {low + unit}" if low else str(unit)
    named = "gradient_accumulation_steps" if derived == "batch_size" else "batch_size"
    raise UserError(
        f"it cannot be split evenly: {derived} would be {total} / ({other} ({named}) x {size}"
        f" (data_parallel_size)) = {total / unit:g}",
        field="global_batch_size",
        got=total,
        allowed=f"multiples of {unit}; nearest: {nearest}",
    )


def rescale_batch(batch: BatchPlan, data_parallel_size: int) -> BatchPlan:
    """The same global batch on another number of ranks; a rank never holds more samples at once than
    it did.

    Raises:
        UserError: the ranks cannot have equal shares of it.
    """
    share, left = divmod(batch.global_batch_size, data_parallel_size)
    if left or not share:
        raise UserError(
            f"{data_parallel_size} ranks cannot have equal shares of a global batch of"
            f" {batch.global_batch_size}",
            field="global_batch_size",
            got=batch.global_batch_size,
            allowed=f"a multiple of {data_parallel_size}",
        )
    size = _largest_divisor(share, batch.batch_size)
    return BatchPlan(size, share // size, data_parallel_size)


def check_batches(config: DistributedConfig, facts: Facts) -> None:
    """Raise a UserError for settings that need the size of a global batch, where a batch sampler's batches
    differ in size."""
    differ = facts.has_batches and facts.train_batch_size is None
    needs = {"global_batch_size": config.global_batch_size, "lr_scaling.rule": config.lr_scaling.rule}
    for field, value in needs.items():
        if differ and value not in (None, "none"):
            raise UserError(
                "the batches of the loader's batch sampler differ in size, or are not known before they are"
                " drawn, so that steps may have different numbers of samples",
                field=field,
                got=value,
                allowed="nothing beside such a batch sampler",
                remedy="Leave it out: a step takes gradient_accumulation_steps batches on each rank. Or give"
                " the DataLoader a sampler and a batch_size",
            )
