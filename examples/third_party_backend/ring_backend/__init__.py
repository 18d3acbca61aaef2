"""ring: registers the backend. Imported whenever backends are listed, so it imports nothing heavy."""

from __future__ import annotations

from distributed import BackendSpec, Capabilities, hookimpl

__all__ = ["register_backends"]


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The ring backend. What is claimed here is tested by the kit; what is not is refused in the plan."""
    return [
        BackendSpec(
            name="ring",
            target="ring_backend.backend:RingBackend",
            summary="a replica per rank, gradients averaged around a ring of messages",
            requires=("torch",),
            install_hint="pip install 'distributed-trainer[torch]'",
            capabilities=Capabilities(precisions=frozenset({"fp32", "bf16", "fp16"}), checkpoint=True),
        )
    ]
