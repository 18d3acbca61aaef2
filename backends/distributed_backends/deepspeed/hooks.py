"""deepspeed: registers DeepSpeed's ZeRO stages 0 to 3; the class is in `backend`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distributed.errors import UserError
from distributed.interfaces.backend_spec import EXCHANGES, LEVERS, BackendSpec, Capabilities
from distributed.registry.hookspecs import hookimpl
from distributed_backends.deepspeed.keys import CHECKPOINTING
from distributed_backends.deepspeed.native_config import AUTO, NATIVE, ignored, recomputation
from distributed_backends.deepspeed.section import ZeroSection, half_of, native_config, optimizer_place

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan

_TARGET = "distributed_backends.deepspeed.backend:DeepSpeedBackend"
_DEFAULT_STAGE = 2
_BUCKETS = ("bucket_cap_mb", "gradient_as_bucket_view")
_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def stage_of(config: DistributedConfig) -> int:
    """The ZeRO stage; 2 by default."""
    return _DEFAULT_STAGE if config.zero_stage is None else config.zero_stage


def _unpredicted(config: DistributedConfig) -> tuple[str, object] | None:
    """Offloading, and anything of DeepSpeed's own configuration."""
    section = ZeroSection.of(config)
    for name in ("offload_optimizer", "offload_parameters"):
        if getattr(section, name) != "none":
            return f"zero.{name}", getattr(section, name)
    return next(((f"{NATIVE}.{name}", value) for name, value in native_config(config).items()), None)


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The DeepSpeed backend."""
    return [
        BackendSpec(
            name="deepspeed",
            target=_TARGET,
            memory="distributed.planner.estimates.zero_layout:ZeroStages",
            summary="DeepSpeed ZeRO 0 to 3: optimizer, gradients, parameters sharded by stage, or offloaded",
            requires=("torch", "deepspeed"),
            install_hint="pip install 'distributed-trainer[deepspeed]'",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                checkpoint=True,
                auto_batch=True,
                levers=LEVERS - {"optimizer_bits", "fp8"},
                zero_stages=frozenset({0, 1, 2, 3}),
                exchanges=EXCHANGES,
            ),
            zero_stage=stage_of,
            unpredicted=_unpredicted,
            blocking_modules=("torch.distributed", "deepspeed.comm", "mpi4py"),
            preload=(
                "distributed_backends.deepspeed.engine",
                "deepspeed.module_inject.auto_ep_layer",
                "deepspeed.ops.op_builder.all_ops",
                "deepspeed.runtime.zero.muon.muon_optimizer",
                "torch._inductor.compile_fx",
            ),
        )
    ]


@hookimpl
def register_sections() -> dict[str, str]:
    """ZeRO's section of the configuration."""
    return {"zero": "distributed_backends.deepspeed.section:ZeroSection"}


@hookimpl
def check_plan(plan: RunPlan) -> list[str]:
    """Refuse what DeepSpeed would silently ignore, and note the stage.

    Raises:
        UserError: DDP's bucket options are set; offloading that the stage has not; 16-bit weights
            on a processor that cannot.
    """
    config = plan.config
    if plan.spec.target != _TARGET:
        idle = f"the section zero changes nothing under backend '{plan.spec.name}'"
        return [idle] if ZeroSection.of(config).model_fields_set else []
    for name in _BUCKETS:
        if config.is_explicit(name):
            raise UserError(
                "DDP's gradient buckets have no meaning under DeepSpeed",
                field=name,
                got=getattr(config, name),
                remedy="Leave it out; DeepSpeed's own is zero_optimization.reduce_bucket_size in"
                " deepspeed_config",
            )
    stage = stage_of(config)
    if stage > 0 and plan.codec is not None:
        raise UserError(
            f"ZeRO stage {stage} reduces gradients to the shards of ranks, and sends them as they are",
            field="compression.codec",
            got=plan.codec.name,
            allowed="none with zero_stage 1 to 3",
            remedy="Set zero_stage=0, or use backend='fsdp' with parallel.data",
        )
    _check_offloading(config, stage)
    native = native_config(config)
    _check_monitors(native)
    if plan.codec is not None and native.get("communication_data_type", AUTO) != AUTO:
        raise UserError(
            f"the codec {plan.codec.name} decides how gradients are sent",
            field=f"{NATIVE}.communication_data_type",
            got=native["communication_data_type"],
            remedy="Leave out one of them",
        )
    if stage == 3 and config.compile != "none":
        raise UserError(
            "ZeRO 3 gathers parameters inside of modules, which leaves little to compile",
            field="compile",
            got=config.compile,
            allowed="none with zero_stage 3; blocks, model up to zero_stage 2",
            remedy="Use zero_stage=2, or backend='fsdp' with compile=blocks",
        )
    section = ZeroSection.of(config)
    where = {"optimizer": optimizer_place(config), "parameters": section.offload_parameters}
    offloaded = [name for name, place in where.items() if place == "cpu"]
    note = f"ZeRO stage {stage}" + (f", {' and '.join(offloaded)} in host memory" if offloaded else "")
    return [note, *_notes_on_native(config), *_check_half_weights(plan, stage)]


def _notes_on_native(config: DistributedConfig) -> list[str]:
    """Notes on what replaces options of DeepSpeed's own configuration."""
    native, notes = native_config(config), [*ignored(getattr(config, NATIVE) or {})]
    if recomputation(native):
        notes.append(
            f"{NATIVE}.{CHECKPOINTING} is {CHECKPOINTING}={config.activation_checkpointing}, which recomputes"
            " the model's blocks, whether or not the model calls deepspeed.checkpointing"
        )
    unsaid = native.get("gradient_clipping", AUTO) == AUTO and getattr(config, NATIVE) is not None
    if unsaid and config.gradient_clipping is None:
        notes.append(
            f"{NATIVE} has no gradient_clipping, and nothing is clipped; DeepSpeed by itself clips at 1.0"
        )
    return notes


def _check_monitors(native: Mapping[str, Any]) -> None:
    for name, package in _MONITORS.items():
        if native.get(name, {}).get("enabled") is True and find_spec(package) is None:
            raise UserError(
                f"the package {package} is not installed",
                field=f"{NATIVE}.{name}.enabled",
                got=True,
                remedy=f"Install it: pip install {package}",
            )


def _check_offloading(config: DistributedConfig, stage: int) -> None:
    needs = {"offload_optimizer": (1, 2, 3), "offload_parameters": (3,)}
    section = ZeroSection.of(config)
    if config.optimizer_offload and stage == 0:
        raise UserError(
            "ZeRO stage 0 steps the optimizer on the device",
            field="optimizer_offload",
            got=True,
            allowed="false with zero_stage 0",
            remedy="Set zero_stage=1 or higher",
        )
    for name, stages in needs.items():
        if getattr(section, name) != "none" and stage not in stages:
            raise UserError(
                f"ZeRO stage {stage} has nothing of its own to keep there",
                field=f"zero.{name}",
                got=getattr(section, name),
                allowed=f"none, or cpu with zero_stage {' or '.join(map(str, stages))}",
                remedy=f"Leave it out, or choose stage {stages[0]}",
            )


def _check_half_weights(plan: RunPlan, stage: int) -> list[str]:
    asked = half_of(plan.config)
    if asked and stage == 0:
        return [f"stage 0 keeps weights in their own dtype: {asked} is autocast"]
    if asked == "fp16" and plan.device == "cpu":
        raise UserError(
            "DeepSpeed has no fp16 weights on a CPU",
            field="deepspeed_config.fp16",
            got=native_config(plan.config)["fp16"],
            allowed="bf16",
            remedy="Leave it out and set mixed_precision=fp16, which is autocast over float32 weights",
        )
    return []
