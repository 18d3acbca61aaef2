"""Copy batches of any form to a device, also before they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Transfers", "move", "tensors_of"]

_LARGE = 1 << 20
"""Bytes from which on a copy takes longer on the device than a stream of its own costs the host."""


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


class Transfers:
    """Copies of batches to a device that begin before the batches are needed.

    A large batch in pinned memory is copied on a stream of its own, beside the step that the device computes.
    Any other is copied behind that step: while it is computed, the host has gone on.

    Args:
        device: not the CPU.
    """

    def __init__(self, device: str) -> None:
        self._device, self._has_streams = device, torch.device(device).type == "cuda"
        self._begun: dict[int, tuple[Any, Any, Any]] = {}
        self._stream: Any = None

    def begin(self, batch: Any) -> None:
        """Begin to copy `batch`, which must not change any more."""
        # The batch is held, too: its address names it.
        if self._has_streams and _is_large(batch):
            self._begun[id(batch)] = (batch, *self._copy_beside(batch))
        else:
            self._begun[id(batch)] = (batch, move(batch, self._device), None)

    def take(self, batch: Any) -> Any:
        """`batch` on the device."""
        found = self._begun.pop(id(batch), None)
        if found is None:
            return move(batch, self._device)
        _, moved, copied = found
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in tensors_of(moved):
                # Its memory belongs to the other stream, which must not use it again before this one is done.
                tensor.record_stream(current)
        return moved

    def forget(self) -> None:
        """Drop what was copied and not taken."""
        self._begun.clear()

    def _copy_beside(self, batch: Any) -> tuple[Any, Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = move(batch, self._device)
        return moved, self._stream.record_event()


def _is_large(batch: Any) -> bool:
    """Whether the tensors of `batch` are all known, pinned, and large together."""
    try:
        tensors = list(tensors_of(batch))
    except TypeError:
        return False
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return size >= _LARGE and all(tensor.is_pinned() for tensor in tensors)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors that `move` copies.

    Raises:
        TypeError: `batch` has an object that copies itself, and may hold any.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)
    elif hasattr(batch, "to"):
        raise TypeError(f"a {type(batch).__name__} copies itself")
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            if field.init:
                yield from tensors_of(getattr(batch, field.name))
