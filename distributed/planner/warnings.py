"""Notes on plans that are legal and most likely mistakes, and the refusal of an epoch without a step."""

from __future__ import annotations

import os

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.placement import RankPlacement
from distributed.interfaces.plan import BatchPlan, Facts

__all__ = ["core_notes", "lever_notes", "sample_notes"]

RANKS_PER_CORE = 8
"""CPU ranks per core of a host above which a run gets a warning."""


def core_notes(spec: BackendSpec, placement: RankPlacement) -> list[str]:
    """A warning when the CPU ranks of this host are many more than its cores."""
    if placement.device != "cpu" or (spec.remote and placement.joined is None):
        return []
    ranks, cores = placement.local_size, _count_cores()
    if ranks <= RANKS_PER_CORE * cores:
        return []
    return [
        f"{ranks} CPU ranks run on this host of {cores} cores: {ranks / cores:.4g} ranks share a core, and"
        f" more than {RANKS_PER_CORE} are slow. Training continues. Use at most {RANKS_PER_CORE * cores}"
        " ranks per host"
    ]


def lever_notes(config: DistributedConfig, placement: RankPlacement) -> list[str]:
    """Settings of memory and speed that have no effect on these ranks."""
    if placement.device != "cpu":
        return []
    notes = {
        "activation_checkpointing=offload saves no more memory than full on CPU ranks, whose activations are"
        " in host memory": config.activation_checkpointing == "offload",
        "optimizer_offload changes nothing on CPU ranks, whose optimizer is in host memory": (
            config.optimizer_offload
        ),
        "matmul_precision=tf32 changes nothing on CPU ranks": config.matmul_precision == "tf32",
        "matmul_precision=fp8 is emulated on CPU ranks: the results are rounded to fp8, and slower": (
            config.matmul_precision == "fp8"
        ),
    }
    return [note for note, applies in notes.items() if applies]


def sample_notes(config: DistributedConfig, batch: BatchPlan, facts: Facts) -> list[str]:
    """A note when a global batch is larger than the dataset.

    Raises:
        UserError: ``drop_last`` would drop it, so that an epoch has no step.
    """
    own, samples = facts.train_batch_size, facts.num_samples
    if facts.has_batches and own is None:
        number = batch.gradient_accumulation_steps * batch.data_parallel_size
        return [
            f"batches of the loader's batch sampler differ in size; a step takes {number}, whatever they hold"
        ]
    read = f"is read in micro-batches of {batch.batch_size}, which the global batch needs"
    notes = [f"the DataLoader has batch_size={own}, and {read}"] * (own not in (None, 1, batch.batch_size))
    if samples is None or samples >= batch.global_batch_size:
        return notes
    if facts.drop_last if config.data.drop_last is None else config.data.drop_last:
        raise UserError(
            f"drop_last drops the only global batch: the dataset has fewer samples than a {batch}",
            field="train_loader",
            got=f"{samples} samples",
            allowed=f"at least {batch.global_batch_size} samples",
            remedy="Reduce the batch, or set drop_last to false",
        )
    return [
        *notes,
        f"the dataset has {samples} samples, and a {batch}: each epoch is one step on {samples} samples",
    ]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))
