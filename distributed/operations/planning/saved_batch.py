"""The micro-batch of a run that is continued: its size is kept, so that resuming repeats the same bits."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.object_store import located
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.interfaces.plan import RunPlan

__all__ = ["as_saved", "same_share", "saved_size"]


def as_saved(size: int) -> str:
    """Why a run has a size that was saved."""
    return f"batch_size=auto: {size}, as in the checkpoint"


def saved_size(plan: RunPlan) -> int | None:
    """The size with which the checkpoint that the run resumes was trained, if its ranks had the same share
    of the same global batch: resuming repeats the same bits."""
    config = plan.config
    source = config.checkpoint_dir if config.resume_from_checkpoint is True else config.resume_from_checkpoint
    if not source:
        return None
    directory = located(str(source))[1]
    for path in (directory, *PortableCheckpointer(directory, keep_last=None).candidates()):
        try:
            reader = PortableReader(path)
        except UserError:
            continue  # a directory of checkpoints, or a damaged one
        reader.close()
        return same_share(plan, reader.extra.get("batch") or {})
    return None


def same_share(plan: RunPlan, saved: Mapping[str, int]) -> int | None:
    """The saved size, if `plan` divides the same global batch into as many slices."""
    size, slices = saved.get("batch_size", 0), saved.get("data_parallel_size", 0)
    whole = size * slices * saved.get("gradient_accumulation_steps", 0)
    batch = plan.batch
    same = (whole, slices) == (batch.global_batch_size, batch.data_parallel_size)
    return size if same and size in plan.micro_batches else None
