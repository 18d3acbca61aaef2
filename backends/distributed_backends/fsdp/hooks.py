"""fsdp: registers torch's fully_shard (FSDP2); the class is in `backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.errors import UserError
from distributed.interfaces.backend_spec import EXCHANGES, LEVERS, SCHEDULES, BackendSpec, Capabilities
from distributed.registry.hookspecs import hookimpl
from distributed_backends.fsdp.section import FSDPSection

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan

_TARGET = "distributed_backends.fsdp.backend:FSDPBackend"


def _axis_sizes(config: DistributedConfig) -> dict[str, tuple[int, str]]:
    """``fsdp.replicate`` is another name of ``parallel.data``."""
    section = FSDPSection.of(config)
    given = "replicate" in section.model_fields_set
    return {"data": (section.replicate, "fsdp.replicate")} if given else {}


_PREDICTED = frozenset({"replicate"})
"""Fields of the section whose effect is that of a core field which predictions know."""


def _unpredicted(config: DistributedConfig) -> tuple[str, object] | None:
    """The first field of the section that is not at its default, such as other units of sharding."""
    section = FSDPSection.of(config)
    for name, field in FSDPSection.model_fields.items():
        if name not in _PREDICTED and getattr(section, name) != field.default:
            return f"fsdp.{name}", getattr(section, name)
    return None


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The FSDP2 backend."""
    return [
        BackendSpec(
            name="fsdp",
            target=_TARGET,
            memory="distributed.planner.estimates.sharded_layout:ShardedUnits",
            summary="torch FSDP2: parameters, gradients and optimizer sharded over the ranks",
            requires=("torch",),
            install_hint="pip install 'distributed-trainer[torch]'",
            objects="distributed.parallel.mesh_framework:MeshFramework",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                find_unused_parameters=True,
                sync_batchnorm=True,
                checkpoint=True,
                auto_batch=True,
                axes=("shard", "data", "pipeline", "context", "tensor", "expert"),
                schedules=SCHEDULES,
                levers=LEVERS - {"optimizer_bits"},
                exchanges=EXCHANGES,
                threads=True,
            ),
            axis_sizes=_axis_sizes,
            unpredicted=_unpredicted,
            context_attention="distributed_kernels.attention.context:context_attention",
        )
    ]


@hookimpl
def register_sections() -> dict[str, str]:
    """FSDP's section of the configuration."""
    return {"fsdp": "distributed_backends.fsdp.section:FSDPSection"}


@hookimpl
def check_plan(plan: RunPlan) -> list[str]:
    """Refuse offloading without ranks."""
    section, ranks = FSDPSection.of(plan.config), plan.world_size
    if plan.spec.target != _TARGET:
        idle = f"the section fsdp changes nothing under backend '{plan.spec.name}'"
        return [idle] if section.model_fields_set else []
    _check_alias(plan.config, section)
    if plan.config.optimizer_offload and not section.cpu_offload and plan.device == "cuda":
        raise UserError(
            "FSDP2 keeps the optimizer where the shards of the parameters are",
            field="optimizer_offload",
            got=True,
            allowed="true with fsdp.cpu_offload=true, which offloads both",
        )
    if section.cpu_offload and ranks == 1 and plan.device == "cuda":
        raise UserError(
            "a single rank has no other rank to shard with and keeps the whole model on its device",
            field="fsdp.cpu_offload",
            got=True,
            allowed="false on 1 rank",
            remedy="Train on two ranks or more",
        )
    if section.cpu_offload and plan.dims.data_parallel_size == 1 and plan.device == "cuda":
        raise UserError(
            "all ranks have the same samples, so that no rank shards, and each keeps its model on its device",
            field="fsdp.cpu_offload",
            got=True,
            allowed="false where no two ranks have different samples",
            remedy="Use more ranks, or backend=pytorch-ddp with optimizer_offload=true",
        )
    if section.cpu_offload and plan.dims.expert > 1 and plan.device == "cuda":
        raise UserError(
            "experts that ranks divide stay on their device, and the optimizer would step on the CPU",
            field="fsdp.cpu_offload",
            got=True,
            allowed="false with parallel.expert",
            remedy="Leave parallel.expert out, so that FSDP2 shards and offloads the experts, too",
        )
    return _check_gathered(plan, section.param_dtype) if section.param_dtype else []


def _check_gathered(plan: RunPlan, dtype: str) -> list[str]:
    """Raise a UserError if parameters cannot be gathered in `dtype`; otherwise a note that they are."""
    if plan.precision != dtype:
        raise UserError(
            f"parameters would be gathered in another precision than they are used in, {plan.precision}",
            field="fsdp.param_dtype",
            got=dtype,
            allowed="that of mixed_precision",
            remedy=f"Set mixed_precision={dtype}, or leave fsdp.param_dtype out",
        )
    divided = [axis for axis in ("tensor", "pipeline", "context", "expert") if plan.dims.size(axis) > 1]
    if divided:
        raise UserError(
            f"the parts of a divided model (parallel.{divided[0]}) are compared with the whole model, which"
            " is not rounded",
            field="fsdp.param_dtype",
            got=dtype,
            allowed="nothing beside parallel.tensor, pipeline, context and expert",
            remedy="Leave fsdp.param_dtype out",
        )
    if plan.world_size == 1:
        return ["fsdp.param_dtype changes nothing on a single rank, which gathers nothing"]
    return [
        f"fsdp.param_dtype={dtype}: gathered parameters are rounded for every operation, so that this run is"
        " not equal to one of another backend or number of ranks"
    ]


def _check_alias(config: DistributedConfig, section: FSDPSection) -> None:
    """Raise a UserError if `fsdp.activation_checkpointing` and the flat field ask for different things."""
    asked = "full" if section.activation_checkpointing else "none"
    given = {"activation_checkpointing"} & section.model_fields_set
    if given and config.is_explicit("activation_checkpointing") and asked != config.activation_checkpointing:
        raise UserError(
            f"activation_checkpointing={config.activation_checkpointing} contradicts it",
            field="fsdp.activation_checkpointing",
            got=section.activation_checkpointing,
            remedy="Leave it out: true is activation_checkpointing=full",
        )
