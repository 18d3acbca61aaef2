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


def _codec(config: DistributedConfig) -> tuple[str, str] | None:
    """``horovod.compression`` is another name of ``compression.codec``."""
    name = HorovodSection.of(config).compression
    return None if name == "none" else (name, "horovod.compression")


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The Horovod backend for torch models."""
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
    """Refuse Horovod's options under another backend, which would drop them in silence.

    Raises:
        UserError: `horovod.compression` or `horovod.timeline` is set and no backend reads it.
    """
    options = HorovodSection.of(plan.config)
    for name, idle in (("compression", "none"), ("timeline", None)):
        if plan.spec.target != _TARGET and getattr(options, name) != idle:
            raise UserError(
                f"backend '{plan.spec.name}' does not read Horovod's options",
                field=f"horovod.{name}",
                got=getattr(options, name),
                allowed=f"{idle or 'nothing'} under '{plan.spec.name}'",
                remedy=f"Leave it out, or use backend='{NAME}'",
            )
