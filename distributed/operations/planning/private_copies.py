"""Keep what a user gave as it is while facts are recorded with fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from distributed.errors import UserError

__all__ = ["private_copies", "unchanged_modules"]

_Values = list[tuple[dict[str, Any], dict[str, Any]]]
"""(a dictionary, what it had)."""


def private_copies(given: tuple[Any, ...], memo: dict[int, Any]) -> tuple[Any, ...]:
    """Deep copies of a loss and a training step, with what their closures and default arguments hold.

    Args:
        memo: of `copy.deepcopy`: what was copied before, such as the model.

    Raises:
        UserError: one of them holds something that cannot be copied.
    """
    return tuple(_copied(value, memo) for value in given)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        return _copied_function(value, memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        # A class of the user may raise anything where it is copied.
        raise UserError(
            "the loss or the training step holds an object that cannot be copied, and facts are recorded with"
            " a copy, so that nothing of the training changes",
            field="training_step",
            got=f"{type(value).__name__}: {type(error).__name__}: {error}"[:160],
            allowed="functions, modules and objects that copy.deepcopy accepts",
            remedy="Create such an object inside of the function, or at its module's top level",
        ) from error


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """`copy.deepcopy` returns functions as they are."""
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    memo[id(function)] = made  # before its cells, one of which may hold it
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            held = original.cell_contents
        except ValueError:
            continue  # a variable that has no value yet
        cell.cell_contents = _copied(held, memo)
    made.__defaults__ = _copied(function.__defaults__, memo)
    made.__kwdefaults__ = _copied(function.__kwdefaults__, memo)
    made.__dict__.update(function.__dict__)
    return made


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
