"""State that a model or its loss carries from one forward pass to the next: hidden states, queues, averages.

A step of several micro-batches, or of several ranks, changes it otherwise than one micro-batch does. It is
found by value: all that model and loss hold is compared before and after a step's forward passes, and the
loss of a batch is computed with the state of both moments.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from io import IOBase
from operator import length_hint
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from distributed.checkpoint.dtensor import local_part
from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.resilience.divergence import sum_of_bits
from distributed.system.tensors import assign_values, digest_of
from distributed.training.forward_state import Buffers, refuse_changes, warn_of_changes
from distributed.training.plain_attributes import OF_MODULES
from distributed.training.refilling import GENERATORS, random_state, set_cell, set_random_state

__all__ = ["CarriedState", "StateWatch"]

_OURS = ("distributed", "distributed_backends", "distributed_plugins")
_CLOSED = {"torch", "deepspeed", "horovod", "ray", *_OURS, *sys.stdlib_module_names}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LARGE, _MANY = 2**24, 10**5
"""Bytes and elements from which on something outside a module counts as data, which nothing changes."""
_OFTEN = 16
"""First steps at each of which state is looked at again that the loss did not depend on."""
_ROUNDING = 1e-3
"""Relative difference of a repeated loss that is no rounding: of state that cannot be put back."""


class CarriedState:
    """All that a model and its loss hold at one moment, without weights that the optimizer changes.

    Args:
        model: with its attributes, whatever containers and objects they are in.
        loss: objects and functions that compute the loss, by name.
        whole: hold what `put` needs of parameters and random number generators, too.
    """

    def __init__(self, model: nn.Module, loss: Mapping[str, Any], whole: bool = False) -> None:
        self._model, self._loss, self._whole = model, loss, whole
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._held_values: dict[int, tuple[str, Any, Any]] = {}
        self.values: dict[str, str] = {}
        self.fixed: set[str] = set()
        self.iterators: list[str] = []
        self._walk("", model, inside=True)
        for name, part in loss.items():
            self._walk(name, part, inside=False)
        self._statistics = Buffers(model)

    def changed(self, now: CarriedState) -> list[str]:
        """Names of values that are others in `now`, without the statistics of norms."""
        return [n for n in {**self.values, **now.values} if self.values.get(n) != now.values.get(n)]

    def changed_buffers(self) -> list[str]:
        """As `Buffers.changed`."""
        return self._statistics.changed()

    def matters(
        self, names: Collection[str], loss: Callable[[], float], on_any: Callable[[bool], bool]
    ) -> bool:
        """True if `loss` differs between the values `names` of this moment and those of now, to which all
        returns.

        Args:
            on_any: whether a flag is set on any rank.
        """
        after, generators = CarriedState(self._model, self._loss, whole=True), capture_rng()

        def value(is_before: bool) -> float:
            after.put()
            if is_before:
                self.put(names)
            restore_rng(generators)
            return loss()

        try:
            now, before = value(False), value(True)
            if not on_any(now != before):
                return False
            noise = max(abs(value(True) - before), abs(value(False) - now))
        finally:
            after.put()
            restore_rng(generators)
        least = sys.float_info.epsilon * abs(before)
        return abs(now - before) > 8 * max(noise, least) or noise > _ROUNDING * abs(before)

    @torch.no_grad()
    def put(self, names: Collection[str] | None = None) -> None:
        """Give everything, or what `names` names, its values of this moment."""
        around = None if names is None else {part for name in names for part in _prefixes(name)}
        for path, value, content in self._held_values.values():
            if content is not None and (around is None or path in around):
                _put(value, content, partial(_concerns, around, path))

    def _walk(self, path: str, value: Any, inside: bool, compared: bool = True) -> None:
        """Hold `value` and all that it holds.

        Args:
            inside: a module holds it.
            compared: its values count as state.
        """
        if isinstance(value, _PLAIN):
            self.values[path] = repr(value)
            return
        if hasattr(type(value), "__next__") and not isinstance(value, IOBase):
            self.iterators.append(path)
            self.fixed.add(path)
            self.values[path] = _position(value)
            return
        inside = inside or isinstance(value, nn.Module)
        if id(value) in self._held_values or not (inside or _is_small(value)):
            return
        if isinstance(value, Tensor):
            self._hold_tensor(path, value, compared)
            return
        self._held_values[id(value)] = path, value, self._content(value)
        if isinstance(value, np.ndarray):
            self.values[path] = digest_of((value.dtype, value.shape, zlib.crc32(value.tobytes())))
        elif isinstance(value, (set, frozenset)):
            self.values[path] = repr(sorted(map(repr, value)))
        elif isinstance(value, nn.Module):
            self._walk_module(path, value)
        else:
            for name, part in _parts(value):
                self._walk(_join(path, name), part, inside, compared)

    def _walk_module(self, path: str, module: nn.Module) -> None:
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
        self._held_values[id(module._buffers)] = path, module._buffers, dict(module._buffers)
        for name, buffer in module._buffers.items():
            self._walk(_join(path, name), buffer, True, not is_norm)
        hooks = {**module._forward_pre_hooks, **module._forward_hooks}
        for parts in (module._parameters, module._modules, hooks, _attributes(module)):
            for key, part in parts.items():
                self._walk(_join(path, key), part, True)

    def _hold_tensor(self, path: str, tensor: Tensor, compared: bool) -> None:
        is_weight, content = isinstance(tensor, nn.Parameter), None
        if _is_readable(tensor) and (self._whole or not is_weight):
            alias = local_part(tensor.data)
            content = alias, alias.clone()
        self._held_values[id(tensor)] = path, tensor, content
        if not compared or id(tensor) in self._trained or not _is_readable(tensor):
            return
        if hasattr(tensor, "ds_id"):
            return  # gathered or not, its engine decides
        if is_weight:
            self.fixed.add(path)
        self.values[path] = digest_of(sum_of_bits(tensor) if is_weight else local_part(tensor))

    def _content(self, value: Any) -> Any:
        """Return what `_put` needs; None for what is left alone."""
        if isinstance(value, tuple(GENERATORS)):
            return random_state(value) if self._whole else None
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, nn.Module):
            return _attributes(value)
        if isinstance(value, (list, deque, set, dict)):
            return value.copy()
        if isinstance(value, CellType):
            return list(_parts(value))
        return _globals(value) if isinstance(value, FunctionType) else None


class StateWatch:
    """Looks at the carried state of a rank at its first steps, and at ever fewer later ones.

    Args:
        backend: a `TorchBackend`.
        several: a step has several micro-batches, on this or other ranks.
    """

    def __init__(self, backend: Any, several: bool) -> None:
        config = backend.config
        self._watched_rank, self._several = backend, several
        self.is_on = config.chooses_batch or several
        self._step, self._next, self._most_samples = 0, 1, 0
        self._searched_batch: tuple[Any, int] = (None, 0)

    def state(self, whole: bool = False) -> CarriedState:
        """The state now."""
        return CarriedState(self._watched_rank.module, self._watched_rank.objective.functions, whole)

    def before(self, window: Window) -> CarriedState | None:
        """The state before the forward passes of `window`, if it is to be looked at."""
        if not self.is_on:
            return None
        self._step += 1
        # A last window may have no sample for some rank.
        is_due = self._step >= self._next and window.num_samples >= self._most_samples
        if not is_due:
            return None
        batch, num_samples = window.micro_batches[0]
        self._searched_batch = _shallow(batch), num_samples  # a training step may empty it
        return self.state()

    def check(self, first: CarriedState, window: Window) -> None:
        """Refuse state that the forward passes have changed since `first`, if the loss depends on it.
        Collective.

        Raises:
            UserError: the run would not carry it as one micro-batch in one process does.
        """
        config, step = self._watched_rank.config, self._step
        buffers = first.changed_buffers()
        if config.chooses_batch:
            refuse_changes(buffers)
        exact = config.carried_state == "exact" and self._watched_rank.world.model_parallel_size == 1
        now = self.state()
        found = first.changed(now)
        is_found = exact and self._several and self._on_any(bool(found))
        if is_found:
            found = self._differing(found, now, window)
            written = [name for name in found if name in first.fixed | now.fixed]
            if self._on_any(bool(written)) or self._matters(first, found, self._loss()):
                _refuse(written or first.iterators or found)
        if self._several and step == 1 and self._watched_rank.world.rank == 0:
            warn_of_changes([name for name in buffers if name in found])
        self._next = (step + 1 if step < _OFTEN else 2 * step) if is_found else 10 * step
        self._most_samples = max(self._most_samples, window.num_samples)

    def _matters(self, first: CarriedState, names: list[str], loss: Callable[[], float]) -> bool:
        if not self._on_any(bool(names)):
            return False
        if self._on_any(bool(first.iterators)):  # which a search would move on
            return True
        return self._on_any(first.matters(names, loss, self._on_any))

    def _differing(self, names: list[str], now: CarriedState, window: Window) -> list[str]:
        """Return those of `names` whose values the samples or the number of micro-batches decide, the same
        on all ranks."""
        if len(window.micro_batches) > 1 or self._watched_rank.reads_own_parameters:
            return names  # ranks that train on their own meet at other steps
        theirs = self._watched_rank.broadcast_object({name: now.values.get(name) for name in names})
        here = [now.values.get(name) != value for name, value in theirs.items()]
        *differ, more = self._watched_rank.all_reduce(
            [*map(float, here), float(not theirs.keys() >= {*names})]
        )
        return [n for n, d in zip(theirs, differ, strict=True) if d] + ["on another rank"] * bool(more)

    def _on_any(self, flag: bool) -> bool:
        if self._watched_rank.reads_own_parameters:
            return flag
        return bool(self._watched_rank.all_reduce([float(flag)])[0])

    def _loss(self) -> Callable[[], float]:
        """Return what computes the loss of the first micro-batch."""
        backend, (batch, num_samples) = self._watched_rank, self._searched_batch
        on_device = backend.to_device(batch)

        def value() -> float:
            with backend.autocast():
                return float(backend.objective(backend.module, _shallow(on_device), num_samples)[0])

        def forward() -> float:
            try:
                with torch.no_grad():
                    return value()
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
            return value()

        def loss() -> float:
            value = float(backend.through("carried state", forward))
            backend.free_gathered()  # no backward pass follows, which would
            return value

        return loss


def _refuse(names: list[str]) -> NoReturn:
    names = names or ["on another rank"]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise UserError(
        f"the model or its loss carries state from one forward pass to the next ('{names[0]}'{more}), on"
        " which the loss depends, and a step has several micro-batches",
        field="carried_state",
        got="exact",
        allowed="exact on one rank without gradient accumulation; per_rank",
        remedy="Train so (num_processes=1, gradient_accumulation_steps=1), or set carried_state=per_rank:"
        " each rank carries the state of its own micro-batches, which depends on their number",
    )


def _shallow(batch: Any) -> Any:
    return batch.copy() if isinstance(batch, (dict, list)) else batch


def _concerns(names: Collection[str] | None, path: str, name: str) -> bool:
    return names is None or _join(path, name) in names


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}".strip(".")


def _prefixes(name: str) -> Iterator[str]:
    yield ""
    for position, letter in enumerate(name):
        if letter == ".":
            yield name[:position]
    yield name


def _is_readable(tensor: Tensor) -> bool:
    usual = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return usual and not tensor.is_inference() and not isinstance(tensor, FakeTensor)


def _is_small(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return isinstance(value, nn.Parameter) or value.nbytes < _LARGE
    return not isinstance(value, Collection) or isinstance(value, nn.Module) or _length(value) < _MANY


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple, deque, set, frozenset, dict)) else 0


def _is_open(value: Any) -> bool:
    """True for an object of a class that a script or another library has written."""
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _CLOSED


def _is_written(value: Any) -> bool:
    return isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in _CLOSED


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """(name, part) of what `value` holds."""
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(list(value))
    elif isinstance(value, CellType):
        try:
            yield "", value.cell_contents
        except ValueError:  # empty until it is assigned
            return
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif type(value).__module__ == "functools" and hasattr(value, "func"):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, FunctionType) and _is_written(value):
        yield from zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, part) for name, part in _globals(value).items() if _is_own(part, value))
        yield from (("", value.__dict__), ("", value.__kwdefaults__), ("", value.__defaults__))
    if _is_open(value):
        yield "", vars(value)


def _position(iterator: Any) -> str:
    """Text that differs as an iterator advances, as far as it shows."""
    frame = getattr(iterator, "gi_frame", None)
    shown = repr(iterator) if type(iterator).__module__ == "itertools" else ""
    number = getattr(iterator, "_num_yielded", None)
    return f"{length_hint(iterator, -1)} {number} {shown} {frame and (frame.f_lasti, frame.f_locals)}"


def _is_own(part: Any, function: FunctionType) -> bool:
    return not isinstance(part, FunctionType) or part.__globals__ is function.__globals__


def _globals(function: FunctionType) -> dict[str, Any]:
    """Globals that a function of a script names."""
    if not _is_written(function):
        return {}
    known = function.__globals__
    return {n: known[n] for n in _names(function.__code__) if n in known and not isinstance(known[n], type)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _put(value: Any, content: Any, concerns: Callable[[str], bool]) -> None:
    """Let `value` hold `content` of `CarriedState`, of names as far as `concerns` is true."""
    if isinstance(value, Tensor):
        _put_tensor(value, *content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, tuple(GENERATORS)):
        set_random_state(value, content)
    elif isinstance(value, CellType):
        for _, part in content:
            set_cell(value, part)
    elif isinstance(value, FunctionType):
        _fill(value.__globals__, content, lambda name: name in content and concerns(name))
    elif isinstance(value, dict):
        _fill(value, content, concerns)
    elif isinstance(value, (list, deque, set)):
        if len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True)):
            value.clear()
            value.update(content) if isinstance(value, set) else value.extend(content)
    elif isinstance(value, nn.Module):
        _fill(vars(value), content, lambda name: name not in OF_MODULES and concerns(name))


def _put_tensor(tensor: Tensor, alias: Tensor, values: Tensor) -> None:
    own = local_part(tensor.data)
    if isinstance(tensor, nn.Parameter):
        if own.shape != values.shape:
            return  # gathered, or not: its engine knows
    elif own.shape != values.shape or own.data_ptr() != alias.data_ptr():
        tensor.data = own = alias
    if not torch.equal(own, values):
        assign_values(own, values)


def _fill(own: Any, content: Mapping[str, Any], concerns: Callable[[str], bool]) -> None:
    for name in [name for name in own if name not in content and concerns(name)]:
        del own[name]
    for name, part in content.items():
        if own.get(name, _fill) is not part and concerns(name):
            own[name] = part
