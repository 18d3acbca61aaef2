"""Ask for the sections of plugins, when the configuration is first used."""

from __future__ import annotations

from importlib import import_module

__all__ = ["complete"]

# The registry lies above this package and knows the plugins; it is found by name, as plugins are.
_REGISTRY = "distributed.registry.completion"


def complete() -> None:
    """Let the registry add the plugins' sections to `DistributedConfig`; later calls do nothing."""
    import_module(_REGISTRY).complete()
