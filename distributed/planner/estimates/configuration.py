"""The configuration of a split, and whether the planner of runs accepts it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from distributed.config import DistributedConfig, Layer, load_layers
from distributed.config.load import value_of
from distributed.errors import UserError
from distributed.interfaces.codec import DENSE
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.estimates.split import Split, describe
from distributed.planner.estimates.split_of_plan import split_of
from distributed.planner.pipeline import pipeline_shape
from distributed.planner.resolve import resolve
from distributed.registry.catalog import Catalog

__all__ = [
    "FREE_FIELDS",
    "check_places",
    "plan_fields",
    "refusal_of",
    "split_fields",
    "with_free_stages",
]

_AXES = ("pipeline", "data", "shard", "context", "tensor", "expert")

_OF_PIPELINES = ("parallel.schedule", "parallel.num_microbatches", "parallel.stages")
_PLACES = ("num_gpus", "num_processes", "num_nodes", "gpus_per_node")

FREE_FIELDS = {
    "num_gpus": None,
    "num_processes": None,
    "gpus_per_node": None,
    "num_nodes": 1,
    "node_rank": None,
    "zero_stage": None,
    "activation_checkpointing": "none",
    "optimizer_offload": False,
    "parallel.schedule": None,
    "parallel.num_microbatches": None,
    "parallel.stages": (),
    **{f"parallel.{axis}": None if axis in ("data", "shard") else 1 for axis in _AXES},
}
"""Fields that a plan decides, where `split_fields` leaves them out -> their defaults."""


def split_fields(split: Split, device: str = "cuda", devices_per_node: int | None = None) -> dict[str, Any]:
    """Configuration fields that make a run train as `split`, with dotted names.

    Args:
        device: ``cuda``, or ``cpu`` for ranks that are CPU processes.
        devices_per_node: of the hosts, if the ranks are on several; None for one host.
    """
    dims = split.dims
    fields: dict[str, Any] = {
        "backend": split.backend,
        "device": device,
        **_places(dims.world_size, device, devices_per_node),
        "batch_size": split.micro_batch,
        "gradient_accumulation_steps": split.num_micro_batches,
        "global_batch_size": split.micro_batch * split.num_micro_batches * dims.data_parallel_size,
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


def _places(world_size: int, device: str, devices_per_node: int | None) -> dict[str, int]:
    if devices_per_node is None or world_size <= devices_per_node:
        return {"num_processes" if device == "cpu" else "num_gpus": world_size}
    return {"num_nodes": world_size // devices_per_node, "gpus_per_node": devices_per_node}


def check_places(
    base: DistributedConfig,
    kept: Collection[str],
    world_size: int,
    device: str,
    devices_per_node: int | None = None,
) -> None:
    """Check that what was asked for about hosts and devices is so in every plan.

    Args:
        kept: dotted names of the fields that a plan has to have as `base` has them.

    Raises:
        UserError: plans have another value.
    """
    chosen: dict[str, Any] = {name: FREE_FIELDS[name] for name in _PLACES}
    chosen |= {"device": device} | _places(world_size, device, devices_per_node)
    on_one_host = chosen["num_nodes"] == 1
    for name in sorted(kept & chosen.keys()):
        value, same = value_of(base, name), {chosen[name], "auto", None}
        if on_one_host and name == "gpus_per_node":
            same.add(world_size)
        if value not in same:
            raise UserError(
                f"plans for this hardware on {world_size} devices have another value",
                field=name,
                got=value,
                allowed=f"{chosen[name]}" if chosen[name] is not None else "none, ranks are placed otherwise",
                remedy="Leave it out, or change the hardware or the number of devices",
            )


def with_free_stages(base: DistributedConfig, kept: Collection[str]) -> DistributedConfig:
    """`base` without stages of a pipeline that a plan does not keep, for facts of parts of a model."""
    if "parallel.stages" in kept:
        return base
    return base.model_copy(update={"parallel": base.parallel.model_copy(update={"stages": ()})})


def plan_fields(
    split: Split,
    base: DistributedConfig,
    kept: Collection[str],
    catalog: Catalog,
    device: str,
    devices_per_node: int | None = None,
) -> dict[str, Any]:
    """`split_fields`, and the defaults of fields that `base` sets and `split` does not have.

    Args:
        base: the configuration that these fields override, such as a script's.
        kept: dotted names of the fields that a plan has to have as `base` has them.
    """
    fields = split_fields(split, device, devices_per_node)
    if catalog.backend(split.backend).capabilities.zero_stages:
        fields.setdefault("zero_stage", split.zero_stage)  # its default is another stage
    # What has no meaning with this split cannot be kept.
    dims = split.dims
    of_context = {"parallel.context_attention": "auto"} if dims.context == 1 else {}
    kept = set(kept).difference(of_context, _OF_PIPELINES if dims.pipeline == 1 else ())
    free = FREE_FIELDS | of_context
    changed = {name for name in free.keys() - kept if base.origin(name) != "default"}
    return {name: free[name] for name in free if name in changed} | fields


def refusal_of(
    split: Split,
    catalog: Catalog,
    device: str = "cuda",
    base: Sequence[Layer] = (),
    kept: Collection[str] = (),
    facts: Facts | None = None,
    check: Callable[[RunPlan], None] = lambda plan: None,
) -> str | None:
    """Why the planner of runs refuses `split`; None if it accepts it.

    All ranks are taken to be on one host, so that no rendezvous has to be configured.

    Args:
        base: layers of the configuration that the split overrides.
        kept: dotted names of the fields that a plan has to have as `base` has them.
        facts: about the user's data and optimizer.
        check: raises UserError for a run that the model does not allow.
    """
    resources = Resources(num_gpus=split.dims.world_size if device == "cuda" else 0)
    try:
        fields = plan_fields(split, load_layers(base), set(kept).difference(_PLACES), catalog, device)
        config = load_layers([*base, Layer("plan", fields)])
        plan = resolve(config, catalog, facts or Facts(), resources)
        check(plan)
        own = split_of(plan)
    except UserError as error:
        return error.message
    if plan.dims.pipeline > 1:
        shape = pipeline_shape(plan.config, plan.dims, plan.batch)
        if shape.pieces > 1:
            return f"a run would cut each micro-batch into {shape.pieces} pieces"
    return None if describe(own) == describe(split) else f"a run would be {describe(own)}"
