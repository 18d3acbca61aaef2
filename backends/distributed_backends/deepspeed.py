"""deepspeed: registers DeepSpeed's ZeRO stages 0 to 3; the class is in `deepspeed_backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.errors import UserError
from distributed.hookspecs import hookimpl
from distributed.interfaces.backend import BackendSpec, Capabilities

if TYPE_CHECKING:
    from distributed.plan import RunPlan

__all__ = ["check_plan", "register_backends"]

_TARGET = "distributed_backends.deepspeed_backend:DeepSpeedBackend"
_BUCKETS = ("bucket_cap_mb", "gradient_as_bucket_view")


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The DeepSpeed backend."""
    return [
        BackendSpec(
            name="deepspeed",
            target=_TARGET,
            summary="DeepSpeed ZeRO 0 to 3: optimizer, gradients and parameters sharded by stage, or offloaded",
            requires=("torch", "deepspeed"),
            install_hint="pip install 'distributed-trainer[deepspeed]'",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                checkpoint=True,
                zero_stages=frozenset({0, 1, 2, 3}),
            ),
        )
    ]


@hookimpl
def check_plan(plan: RunPlan) -> None:
    """Refuse what DeepSpeed would drop in silence.

    Raises:
        UserError: DDP's bucket options are set, or 16-bit weights without a ZeRO stage.
    """
    config = plan.config
    if plan.spec.target != _TARGET:
        if config.zero.model_fields_set:
            plan.notes.append(f"the section zero changes nothing under backend '{plan.spec.name}'")
        return
    for name in _BUCKETS:
        if config.is_explicit(name):
            raise UserError(
                "DDP's gradient buckets have no meaning under DeepSpeed",
                field=name,
                got=getattr(config, name),
                remedy="Leave it out; zero_optimization.reduce_bucket_size in deepspeed_config is DeepSpeed's own",
            )
