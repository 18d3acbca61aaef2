"""Find the part of an object that cannot be pickled, to name it in an error."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch

from distributed.communication.task_file import TaskPickler

__all__ = ["find_unpicklable"]


def find_unpicklable(obj: Any, name: str) -> tuple[str, Any] | None:
    """The innermost part of `obj` that cannot be pickled, and where it is: ``name.attribute[key]``.

    Returns:
        None if `obj` can be pickled.
    """
    return None if _is_picklable(obj) else _innermost(obj, name, {id(obj)}) or (name, obj)


def _innermost(obj: Any, name: str, seen: set[int]) -> tuple[str, Any] | None:
    """None where `obj` cannot be pickled because of what holds it, and is in `seen`."""
    is_cause = True
    for path, part in _parts(obj, name):
        if id(part) in seen:
            is_cause = False
        elif not _is_picklable(part):
            seen.add(id(part))
            found = _innermost(part, path, seen)
            if found is not None:
                return found
            is_cause = False
    return (name, obj) if is_cause else None


class _Probe(TaskPickler):
    """Pickles all but the values of tensors, which may be large."""

    def persistent_id(self, obj: Any) -> str | None:
        return "tensor" if type(obj) in (torch.Tensor, torch.nn.Parameter) and not vars(obj) else None


def _is_picklable(obj: Any) -> bool:
    try:
        _Probe(io.BytesIO(), 5).dump(obj)
    except Exception:  # noqa: BLE001 - an object may raise anything from a __reduce__ of its own
        return False
    return True


def _parts(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        yield from ((f"{name}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, FunctionType):
        yield from _parts_of_function(obj, name)
    elif isinstance(obj, MethodType):
        yield name, obj.__self__
        yield from _parts(obj.__func__, name)
    elif isinstance(obj, functools.partial):
        yield name, obj.func
        yield from _parts(obj.args, f"{name}.args")
        yield from _parts(obj.keywords, f"{name}.keywords")
    else:
        yield from _attributes(obj, name)


def _parts_of_function(function: Callable[..., Any], name: str) -> Iterator[tuple[str, Any]]:
    used = inspect.getclosurevars(function)
    for variable, value in {**used.globals, **used.nonlocals}.items():
        yield f"{variable} (used by {name})", value
    yield from _parts(function.__defaults__ or (), f"{name}.__defaults__")


def _attributes(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    held = dict(getattr(obj, "__dict__", {}))
    if isinstance(obj, torch.nn.Module):
        for table in ("_modules", "_buffers", "_parameters"):
            held |= held.pop(table, {})
    yield from ((f"{name}.{key}", value) for key, value in held.items())
    if not isinstance(obj, type):
        yield f"the class {type(obj).__name__} of {name}", type(obj)
