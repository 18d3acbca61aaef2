"""A device other than the CPU, emulated in host memory, so that copies and reads of its values show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["DEVICE", "EmulatedDevice"]

DEVICE = "lazy:0"
"""A name of torch's for a device that is no CPU, and whose backward runs without a driver of its own."""

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
"""Operations that return a number to the host, or a shape that depends on values: the host has to wait."""


class _OnDevice(Tensor):
    """A tensor that says that it is on `DEVICE`, and computes with the one that it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _OnDevice:
        made: _OnDevice = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE),
        )
        made.held = held
        return made

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"_OnDevice({tuple(self.shape)})"

    def tolist(self) -> Any:
        return self.cpu().tolist()  # as on a device; torch refuses it for subclasses

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})


class EmulatedDevice(TorchDispatchMode):
    """Puts what is made on `DEVICE`, or copied to it, into host memory, and counts while `counts` is true.

    Attributes:
        reads: operations that the host waits for -> calls.
        to_device: copies from the host, by the shape of what was copied.
        to_host: copies to the host, by shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = False
        self.reads: Counter[str] = Counter()
        self.to_device: Counter[tuple[int, ...]] = Counter()
        self.to_host: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _compute(function, args, kwargs or {})
        if self.counts:
            self._count(str(function).split(".")[1], args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        held = [isinstance(part, _OnDevice) for part in tree_flatten(args)[0] if isinstance(part, Tensor)]
        if name in _READS and any(held):
            self.reads[name] += 1
        if name == "_to_copy" and held[0] != isinstance(result, _OnDevice):
            (self.to_host if held[0] else self.to_device)[tuple(result.shape)] += 1
        if name in ("copy_", "_copy_from", "_foreach_copy_") and len(set(held)) > 1:
            (self.to_device if held[0] else self.to_host)[tuple(args[0].shape)] += 1


def _compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `function` returns, computed on what the tensors hold."""
    given = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, _OnDevice)]
    on_device = bool(given)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == torch.device(DEVICE).type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(_held, args), tree_map(_held, kwargs)
    result = function(*args, **kwargs)
    if not on_device:
        return result
    known = {id(tensor.held): tensor for tensor in given}  # in-place operations return what they were given

    def placed(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return known[id(part)] if id(part) in known else _OnDevice(part)

    return tree_map(placed, result)


def _held(part: Any) -> Any:
    return part.held if isinstance(part, _OnDevice) else part
