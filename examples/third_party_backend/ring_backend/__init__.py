"""ring: registers the backend and its section. Imported whenever plugins are listed: nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import BackendSpec, Capabilities, hookimpl
from distributed.interfaces.backend_spec import LEVERS

if TYPE_CHECKING:
    from distributed.interfaces.plan import RunPlan

__all__ = ["check_plan", "register_backends", "register_sections"]

_TARGET = "ring_backend.backend:RingBackend"


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The ring backend. What is claimed here is tested by the kit; what is not is refused in the plan."""
    return [
        BackendSpec(
            name="ring",
            target=_TARGET,
            summary="a replica per rank, gradients averaged around a ring of messages",
            requires=("torch",),
            install_hint="pip install 'distributed-trainer[torch]'",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}), checkpoint=True, levers=LEVERS
            ),
        )
    ]


@hookimpl
def register_sections() -> dict[str, str]:
    """The fields `ring.chunk_size` and `ring.direction` of the configuration."""
    return {"ring": "ring_backend.section:RingSection"}


@hookimpl
def check_plan(plan: RunPlan) -> list[str]:
    """Report options that another backend does not read."""
    from ring_backend.section import RingSection

    idle = RingSection.of(plan.config).model_fields_set and plan.spec.target != _TARGET
    return [f"the section ring changes nothing under backend '{plan.spec.name}'"] if idle else []
