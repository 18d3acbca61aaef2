"""Copy batches of any form to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

__all__ = ["move"]


def move(batch: Any, device: str) -> Any:
    """Tensors in nested tuples, lists, mappings and dataclasses, copied to `device` without waiting."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        kind: Any = type(batch)
        return moved if kind is dict else kind(moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(value, device) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: move(getattr(batch, f.name), device) for f in fields(batch) if f.init}
        return replace(batch, **values)
    return batch
