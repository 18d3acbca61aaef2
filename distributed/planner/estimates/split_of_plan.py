"""The `Split` of a resolved plan: what predictions need to know of a run."""

from __future__ import annotations

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.codec import DENSE
from distributed.interfaces.plan import RunPlan
from distributed.planner.estimates.split import Split
from distributed.planner.pipeline import pipeline_shape, plain_shape

__all__ = ["PREDICTED", "split_of"]

PREDICTED: dict[str, tuple[object, ...]] = {
    "activation_checkpointing": ("none", "full"),
    "compile": ("none",),
    "optimizer_bits": (32,),
    "matmul_precision": ("default", "tf32"),
    "gradient_as_bucket_view": (True,),
    "sync_batchnorm": (False,),
}
"""Field -> values whose effect on the memory and the time of a rank a `Split` describes."""


def split_of(plan: RunPlan) -> Split:
    """How `plan` divides the model and its global batch. The optimizer is that of the configuration: one that
    was passed to the trainer is not part of a plan.

    Raises:
        UserError: a setting changes memory or time, and predictions do not know how.
    """
    config, dims, batch = plan.config, plan.dims, plan.batch
    _check(plan)
    pieces, schedule = 1, "1f1b"
    if dims.pipeline > 1:
        shape = pipeline_shape(config, dims, batch)
        pieces, schedule = shape.pieces, shape.schedule
        if shape.num_stages > plain_shape(schedule, shape.num_ranks, shape.num_microbatches).num_stages:
            raise _not_predicted("parallel.stages", f"{shape.num_stages} names")
    return Split(
        dims,
        plan.spec.runs or plan.spec.name,
        zero_stage=plan.spec.zero_stage(config) if plan.spec.zero_stage else 0,
        micro_batch=batch.batch_size // pieces,
        num_micro_batches=batch.gradient_accumulation_steps * pieces,
        schedule=schedule,
        activation_checkpointing=config.activation_checkpointing == "full",
        codec=plan.codec.name if plan.codec is not None else DENSE,
        offload=config.optimizer_offload and plan.device != "cpu",
        precision=plan.precision,
        optimizer=config.optimizer,
    )


def _check(plan: RunPlan) -> None:
    config, own = plan.config, plan.spec.unpredicted
    found = _core_setting(config) or (own(config) if own else None)
    if found is not None:
        raise _not_predicted(*found)


def _not_predicted(field: str, value: object) -> UserError:
    return UserError(
        f"the effect of {field} on the memory and the time of a rank is not predicted",
        field=field,
        got=value,
        remedy="Leave it out, or measure a run",
    )


def _core_setting(config: DistributedConfig) -> tuple[str, object] | None:
    if config.low_communication.is_active:
        return "low_communication.mode", config.low_communication.mode
    for field, predicted in PREDICTED.items():
        value = getattr(config, field)
        if value not in predicted:
            return field, value
    return None
