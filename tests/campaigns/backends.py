"""The backends, each with a number of ranks, under which the campaigns train what others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BACKENDS"]

BACKENDS: dict[str, tuple[str, int, Mapping[str, Any]]] = {
    "serial": ("serial", 1, {}),
    "ddp 2": ("pytorch-ddp", 2, {}),
    "ddp 3": ("pytorch-ddp", 3, {}),
    "fsdp 2": ("fsdp", 2, {}),
    "fsdp 3": ("fsdp", 3, {}),
    **{f"zero {stage}": ("deepspeed", 2, {"zero_stage": stage}) for stage in range(4)},
    "horovod 2": ("horovod", 2, {}),
}
"""Name -> (backend, ranks, options)."""
