"""The configuration of a split, and whether the planner of runs accepts it."""

from __future__ import annotations

from typing import Any

from distributed.config import load
from distributed.errors import UserError
from distributed.interfaces.codec import DENSE
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.estimates.split import Split
from distributed.planner.pipeline import pipeline_shape
from distributed.planner.resolve import resolve
from distributed.registry.catalog import Catalog

__all__ = ["refusal_of", "split_fields"]

_AXES = ("pipeline", "data", "shard", "context", "tensor", "expert")


def split_fields(split: Split, device: str = "cuda") -> dict[str, Any]:
    """Configuration fields that make a run train as `split`, with dotted names.

    Args:
        device: ``cuda``, or ``cpu`` for ranks that are CPU processes.
    """
    dims = split.dims
    ranks = "num_processes" if device == "cpu" else "num_gpus"
    fields: dict[str, Any] = {
        "backend": split.backend,
        "device": device,
        ranks: dims.world_size,
        "batch_size": split.micro_batch,
        "gradient_accumulation_steps": split.num_micro_batches,
        "global_batch_size": split.micro_batch * split.num_micro_batches * dims.data_parallel_size,
        "optimizer": split.optimizer,
    }
    fields |= {f"parallel.{axis}": dims.size(axis) for axis in _AXES if dims.size(axis) > 1}
    if dims.pipeline > 1:
        fields["parallel.schedule"] = split.schedule
    optional = {
        "zero_stage": split.zero_stage or None,
        "activation_checkpointing": "full" if split.activation_checkpointing else None,
        "compression.codec": None if split.codec == DENSE else split.codec,
        "optimizer_offload": split.offload or None,
        "mixed_precision": None if split.precision == "fp32" else split.precision,
    }
    return fields | {name: value for name, value in optional.items() if value is not None}


def refusal_of(split: Split, catalog: Catalog, device: str = "cuda") -> str | None:
    """Why the planner of runs refuses `split`; None if it accepts it.

    All ranks are taken to be on one host, so that no rendezvous has to be configured.
    """
    fields = split_fields(split, device)
    if catalog.backend(split.backend).capabilities.zero_stages:
        fields.setdefault("zero_stage", split.zero_stage)  # its default is another stage
    resources = Resources(num_gpus=split.dims.world_size if device == "cuda" else 0)
    try:
        plan = resolve(load(overrides=fields), catalog, Facts(), resources)
    except UserError as error:
        return error.message
    if plan.dims != split.dims:
        return f"a run would divide the ranks as {plan.dims}"
    if plan.dims.pipeline > 1:
        shape = pipeline_shape(plan.config, plan.dims, plan.batch)
        if shape.pieces > 1:
            return f"a run would cut each micro-batch into {shape.pieces} pieces"
    return None
