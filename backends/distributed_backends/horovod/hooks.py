"""horovod: registers Horovod's ring all-reduce; the class is in `backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.errors import UserError
from distributed.interfaces.backend_spec import EXCHANGES, LEVERS, BackendSpec, Capabilities
from distributed.registry.hookspecs import hookimpl
from distributed_backends.horovod.section import HorovodSection

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan

__all__ = ["check_plan", "register_backends", "register_sections"]

NAME = "horovod"
_TARGET = "distributed_backends.horovod.backend:HorovodBackend"
_COLLECTIVES = "distributed_backends.horovod.ranks:HorovodCollectives"


def _codec(config: DistributedConfig) -> tuple[str, str] | None:
    """``horovod.compression`` is another name of ``compression.codec``."""
    name = HorovodSection.of(config).compression
    return None if name == "none" else (name, "horovod.compression")


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The Horovod backend, of torch models, whose collectives a backend of another framework can use."""
    return [
        BackendSpec(
            name=NAME,
            target=_TARGET,
            summary="Horovod: a replica per rank, gradients summed by ring all-reduce",
            requires=("torch", "horovod"),
            install_hint="make horovod (in a checkout; builds 0.28.1 against the installed torch)",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                find_unused_parameters=True,
                checkpoint=True,
                auto_batch=True,
                levers=LEVERS,
                exchanges=EXCHANGES,
            ),
            codec=_codec,
            collectives=_COLLECTIVES,
            deploy_form="mpi",
            blocking_modules=(
                "torch.distributed",
                "horovod",
                "distributed_backends.horovod.collectives",
                "mpi4py",
            ),
        )
    ]


@hookimpl
def register_sections() -> dict[str, str]:
    """Horovod's section of the configuration."""
    return {"horovod": "distributed_backends.horovod.section:HorovodSection"}


@hookimpl
def check_plan(plan: RunPlan) -> None:
    """Refuse Horovod's options under another backend, which would drop them in silence, and NCCL where
    gradients are not torch's.

    Raises:
        UserError: `horovod.compression` or `horovod.timeline` is set and no backend reads it; NCCL is
            requested under a model of another framework.
    """
    options = HorovodSection.of(plan.config)
    for name, idle in (("compression", "none"), ("timeline", None)):
        if plan.spec.collectives != _COLLECTIVES and getattr(options, name) != idle:
            raise UserError(
                f"backend '{plan.spec.name}' does not read Horovod's options",
                field=f"horovod.{name}",
                got=getattr(options, name),
                allowed=f"{idle or 'nothing'} under '{plan.spec.name}'",
                remedy=f"Leave it out, or use backend='{NAME}'",
            )
    foreign = plan.spec.collectives == _COLLECTIVES and plan.spec.target != _TARGET
    if foreign and plan.communication_backend == "nccl":
        raise UserError(
            "Horovod sums the gradients of a model that is not torch's in host memory",
            field="communication_backend",
            got="nccl",
            allowed="auto, gloo, mpi",
            remedy="Leave it out",
        )
