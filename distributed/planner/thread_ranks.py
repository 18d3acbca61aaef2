"""Ranks that are threads of one process (``launch=threads``): what starts them, and what they cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributed.config import DistributedConfig
from distributed.config.load import value_of
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.registry.catalog import Catalog

__all__ = ["as_threads"]

_THREADS: Mapping[str, Any] = {
    "launcher": "distributed.launch.thread_launcher:ThreadLauncher",
    "transports": ("threads", "threads"),
    "shares_devices": True,
}
"""Fields of a `BackendSpec` whose ranks are threads."""

_ALLOWED: dict[str, tuple[tuple[object, ...], str]] = {
    "num_nodes": ((1,), "threads are ranks of one process, on one host"),
    "communication_backend": (("auto",), "threads exchange tensors in the memory of their process"),
    "compile": (("none",), "compiled code belongs to the process, and its collectives to one rank"),
    "low_communication.mode": (("none",), "ranks that train on their own wait in threads of their own"),
    "checkpoint_dir": (
        (None,),
        "a thread cannot catch signals, nor fail without its process, and both are what checkpoints are for",
    ),
    "profile.enabled": ((False,), "torch.profiler records a process, not one of its ranks"),
    "batch_size": ((), "ranks that share a process share its memory, and cannot try how much one may use"),
}
"""Field -> values with which ranks can be threads, and why not with others; () is all but ``auto``."""


def as_threads(config: DistributedConfig, spec: BackendSpec, catalog: Catalog) -> BackendSpec:
    """`spec` with what starts its ranks as threads, if `config` asks for threads.

    Raises:
        UserError: a setting with which the ranks of a run have to be processes.
    """
    if config.launch != "threads":
        return spec
    if not spec.capabilities.threads or spec.remote:
        able = sorted(s.name for s in catalog.backends.values() if s.capabilities.threads and not s.inner)
        raise UserError(
            f"the ranks of backend '{spec.label}' cannot be threads of one process",
            field="launch",
            got="threads",
            allowed="auto, spawn",
            remedy=f"Backends whose ranks can: {', '.join(able) or 'none installed'}",
        )
    for field, (allowed, why) in _ALLOWED.items():
        value = value_of(config, field)
        if value not in allowed if allowed else value == "auto":
            raise _refused(field, value, allowed, why)
    if config.is_elastic:
        raise _refused(
            "elastic.max_restarts", config.max_restarts, (0,), "a thread that has failed cannot restart"
        )
    return replace(spec, **_THREADS)


def _refused(field: str, value: object, allowed: tuple[object, ...], why: str) -> UserError:
    return UserError(
        f"launch=threads cannot have {field}={value}: {why}",
        field=field,
        got=value,
        allowed=", ".join(str(one) for one in allowed if one is not None) or None,
        remedy=f"Leave {field} out, or use launch=spawn",
    )
