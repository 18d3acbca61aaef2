"""Objects compared with what they were, and filled in place with what a copy of them holds, so that all names
of them see it."""

from __future__ import annotations

import hashlib
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "GENERATORS",
    "digest",
    "functions",
    "is_imported",
    "is_plain",
    "parts",
    "pickle_into",
    "random_state",
    "refill",
    "set_cell",
    "set_random_state",
]

_CAPTURED = (list, deque, dict, set, int, float, str, type(None), Tensor, np.ndarray, nn.Module)
_OWN = ("distributed", "distributed_backends", "distributed_plugins", "torch", "builtins")
_LARGE = 2**24
"""Bytes of a captured tensor from which on it counts as data, which nothing changes."""


GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda own: own.get_state(legacy=False), lambda own, state: own.set_state(state)),
    torch.Generator: (lambda own: own.get_state(), lambda own, state: own.set_state(state)),
}
"""Functions that read and set the state of a random number generator, by class."""


def random_state(value: Any) -> Any:
    """The state of a random number generator; None of something else."""
    return next((read(value) for kind, (read, _) in GENERATORS.items() if isinstance(value, kind)), None)


def set_random_state(generator: Any, state: Any) -> None:
    """Give a generator what `random_state` returned."""
    next(write for kind, (_, write) in GENERATORS.items() if isinstance(generator, kind))(generator, state)


def set_cell(cell: CellType, value: Any) -> None:
    """Let a variable of the function around another one hold `value`."""
    cell.cell_contents = value


def pickle_into(file: Any, value: Any, name_of: Callable[[Any], str | None]) -> bool:
    """Pickle `value`, in which `name_of` gives what is stored by name alone; False if it cannot be."""
    pickler = cloudpickle.Pickler(file, protocol=5)
    pickler.persistent_id = name_of
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - whatever an object of the user raises
        return False
    return True


def digest(value: Any, name_of: Callable[[Any], str | None]) -> bytes | None:
    """Digest of the pickled value; None if it cannot be pickled."""
    sink = _Digest()
    return sink.digest.digest() if pickle_into(sink, value, name_of) else None


class _Digest(io.RawIOBase):
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def parts(holder: Any) -> MutableMapping[str, Any]:
    """Return what `holder` keeps by name: attributes of an object; variables of a function; those of the
    object of a method."""
    if isinstance(holder, partial):
        return parts(holder.func)
    if isinstance(holder, MethodType):
        return parts(holder.__self__)
    if isinstance(holder, nn.Module):
        return {}  # see `held_state.inner_holders`
    if isinstance(holder, FunctionType):
        return _Variables(holder)
    plain = hasattr(holder, "__dict__") and not isinstance(holder, (type, ModuleType))
    return vars(holder) if plain else {}


class _Variables(MutableMapping[str, Any]):
    """Variables of the functions around `function`, and globals that it names, as far as they hold plain
    values, containers, modules, small tensors or arrays."""

    def __init__(self, function: FunctionType) -> None:
        self._globals = function.__globals__
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._variables = dict.fromkeys([*self._cells, *_names(function.__code__, self._globals, set())])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._variables if self._is_kept(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        if name not in self._cells:
            return self._globals[name]
        try:
            return self._cells[name].cell_contents
        except ValueError:  # empty until it is assigned
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            set_cell(self._cells[name], value)
        elif name in self._variables:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError

    def _is_kept(self, name: str) -> bool:
        value = self.get(name, _Variables)
        plain = isinstance(value, _CAPTURED) or (name in self._cells and not callable(value))
        return plain and getattr(value, "nbytes", 0) < _LARGE


def _names(code: CodeType, known: Mapping[str, Any], done: set[CodeType]) -> Iterator[str]:
    """Names that `code`, functions inside it, and functions of the same module that it calls may read of the
    globals `known`."""
    done.add(code)
    for name in code.co_names:
        yield name
        called = known.get(name)
        if isinstance(called, FunctionType) and called.__globals__ is known and called.__code__ not in done:
            yield from _names(called.__code__, known, done)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, known, done)


def is_imported(function: Any) -> bool:
    """True if other processes import `function` with its module, whose globals begin anew there."""
    if function.__module__ == "__main__":
        return False
    try:
        return attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (AttributeError, KeyError):
        return False


def functions(holder: Any) -> Iterator[tuple[str, FunctionType]]:
    """(name, function) of the methods of `holder` that a script has written."""
    owner = holder.__self__ if isinstance(holder, MethodType) else holder
    for kind in type(owner).__mro__[:-1]:
        if kind.__module__.partition(".")[0] not in _OWN:
            yield from ((name, part) for name, part in vars(kind).items() if isinstance(part, FunctionType))


def refill(own: MutableMapping[str, Any], values: Mapping[str, Any], done: set[int] | None = None) -> None:
    """Let each name of `values` in `own` hold what it does there: filled in place, or else replaced."""
    done = set() if done is None else done
    for name, value in values.items():
        present = own.get(name)
        if present is not value and not _fill(present, value, done):
            own[name] = value


def _fill(own: Any, value: Any, done: set[int]) -> bool:
    """Let the object `own` hold what `value` does; False if it cannot."""
    if own is value:
        return True
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        return _fill_array(own, value)
    if type(own) is not type(value) and not (isinstance(own, dict) and type(value) is dict):
        return False
    if isinstance(own, np.ndarray):
        return _fill_array(own, value)
    if id(own) in done:
        return True
    done.add(id(own))
    if isinstance(own, dict):
        for name in own.keys() - value.keys():
            del own[name]
        refill(own, value, done)
        return True
    if isinstance(own, (list, deque, set)):
        held = list(value)
        own.clear()
        own.update(held) if isinstance(own, set) else own.extend(held)
        return True
    if isinstance(own, MethodType):
        return _fill(own.__self__, value.__self__, done)
    if isinstance(own, FunctionType):
        refill(parts(own), parts(value), done)
        return True
    if isinstance(own, nn.Module) or is_plain(own):
        return _fill(vars(own), vars(value), done)
    return False


def _fill_array(own: Any, value: Any) -> bool:
    if own.shape != value.shape or own.dtype != value.dtype:
        return False
    with torch.no_grad():
        own[...] = value
    return True


def is_plain(value: Any) -> bool:
    """True for an object whose attributes are all that it holds, as far as pickle can tell."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType)):
        return False
    kind, plain = type(value), ("__reduce__", "__reduce_ex__", "__getstate__")
    usual = all(getattr(kind, name, None) is getattr(object, name, None) for name in plain)
    return usual and hasattr(value, "__dict__") and not hasattr(kind, "__setstate__")
