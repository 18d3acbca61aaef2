"""Keep what a user gave as it is while facts are recorded with fake tensors."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from distributed.errors import UserError

__all__ = ["LARGE", "Empty", "empty_as", "private_copies", "unchanged_modules"]

Empty = Callable[[Tensor], Tensor]
"""``tensor ->`` one of its shape, strides and dtype without values."""

LARGE = 1 << 16
"""Bytes from which a tensor is copied without values. Numbers that Python code reads are in smaller ones."""
_PLAIN = (Tensor, nn.Parameter)
_SHARED = (type, ModuleType)
"""What a copy shares with its original."""

_Values = list[tuple[dict[str, Any], dict[str, Any]]]
"""(a dictionary, what it had)."""


def empty_as(tensor: Tensor, device: str) -> Tensor:
    """A tensor of the shape, strides and dtype of `tensor` on `device`, without its values."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def private_copies(given: tuple[Any, ...], memo: dict[int, Any], empty: Empty) -> tuple[Any, ...]:
    """Deep copies of a loss and a training step, with the functions that they hold in partials, containers
    and attributes, and with what the closures and default arguments of these hold.

    Args:
        memo: of `copy.deepcopy`: what was copied before, such as the model.
        empty: makes what takes the place of a large tensor or of one without values, such as a parameter of a
            teacher. No values of large tensors are copied.

    Raises:
        UserError: one of them holds something that cannot be copied.
    """
    try:
        functions = list[FunctionType]()
        for held in [*_reachable(given, memo)]:
            if isinstance(held, FunctionType):
                functions.append(held)
                memo[id(held)] = _without_contents(held, memo)
            elif type(held) in _PLAIN and (held.is_meta or held.nbytes >= LARGE):
                memo[id(held)] = _like(held, empty)
        for function in functions:
            _fill(memo[id(function)], function, memo)
        return tuple(copy.deepcopy(value, memo) for value in given)
    except Exception as error:
        # A class of the user may raise anything where it is copied.
        raise UserError(
            "the loss or the training step holds an object that cannot be copied, and facts are recorded with"
            " a copy, so that nothing of the training changes",
            field="training_step",
            got=f"{type(error).__name__}: {error}"[:160],
            allowed="functions, modules and objects that copy.deepcopy accepts",
            remedy="Create such an object inside of the function, or at its module's top level",
        ) from error


def _reachable(given: tuple[Any, ...], memo: Mapping[int, Any]) -> Iterator[Any]:
    """Tensors, and functions with a state, that `copy.deepcopy` would reach from `given` if it followed
    functions; nothing of what `memo` has."""
    waiting, seen = list(given), set(memo)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _SHARED):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) or (isinstance(value, FunctionType) and any(_state_of(value))):
            yield value
        waiting.extend(_parts(value))


def _parts(value: Any) -> Iterator[Any]:
    """What `value` holds directly."""
    if isinstance(value, FunctionType):
        yield from _state_of(value)
    elif isinstance(value, CellType):
        with suppress(ValueError):  # a variable that has no value yet
            yield value.cell_contents
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(value, name, None)


def _state_of(function: FunctionType) -> tuple[Any, ...]:
    return (function.__closure__, function.__defaults__, function.__kwdefaults__)


def _without_contents(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A function with the same code. Functions that share a variable still share one."""
    cells = tuple(memo.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)


def _fill(made: FunctionType, function: FunctionType, memo: dict[int, Any]) -> None:
    for cell, original in zip(made.__closure__ or (), function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            held = original.cell_contents
            cell.cell_contents = copy.deepcopy(held, memo)
    made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    made.__dict__.update(copy.deepcopy(function.__dict__, memo))
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__


def _like(tensor: Tensor, empty: Empty) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty(tensor), requires_grad=tensor.requires_grad)
    return empty(tensor).requires_grad_(tensor.requires_grad)


@contextmanager
def unchanged_modules() -> Iterator[None]:
    """Give modules the tensors back which `Module.to` and its like replace meanwhile. A training step may
    reach modules that are not copied, such as those of its file's top level."""
    before: dict[nn.Module, _Values] = {}
    with ExitStack() as stack:
        stack.callback(_put_all_back, before)
        for kind in (nn.Module, nn.RNNBase):  # the latter changes itself before it calls the former
            apply = kind._apply
            kind._apply = _remembering(apply, before)  # type: ignore[method-assign]
            stack.callback(setattr, kind, "_apply", apply)
        yield


def _remembering(apply: Any, before: dict[nn.Module, _Values]) -> Any:
    def call(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        tensors = (*self._parameters.values(), *self._buffers.values())
        if self in before:
            _put_back(before[self])  # torch does not convert parameters that are fake again
        elif any(tensor is not None and not isinstance(tensor, FakeTensor) for tensor in tensors):
            # Its own variables too: recurrent layers keep a list of their weights.
            before[self] = [(held, dict(held)) for held in (vars(self), self._parameters, self._buffers)]
        made: nn.Module = apply(self, fn, recurse)
        return made

    return call


def _put_all_back(before: dict[nn.Module, _Values]) -> None:
    for values in before.values():
        _put_back(values)


def _put_back(values: _Values) -> None:
    for held, own in values:
        held.clear()
        held.update(own)
