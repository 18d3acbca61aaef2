"""OriginalModel: a module tree before it is cut, to copy it whole and to restore it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from distributed.checkpoint.dtensor import whole
from distributed.parallel.deferred_build import tensors_of
from distributed.system.tensors import assign_values
from distributed.training.whole_model import copy_with

__all__ = ["OriginalModel", "filled"]

_PLAIN = (type(None), bool, int, float, str, tuple)
_ADDED_BY = ("torch.distributed.", "distributed.training.gather_order", "distributed.parallel.")
"""Modules of the hooks that a cut model has more than the whole one."""


class OriginalModel:
    """Snapshot of a module tree before its parameters are replaced by DTensors, which torch cannot undo.

    Args:
        model: whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [(module, type(module), set(vars(module))) for module in model.modules()]
        self._parameters = [
            (module, name, p, _real(p.device))
            for module, _, _ in self._modules
            for name, p in _own(module._parameters)
        ]
        self._buffers = [
            (module, name, _real(b.device))
            for module, _, _ in self._modules
            for name, b in _own(module._buffers)
        ]
        self._added: list[tuple[nn.Module, set[str]]] = []
        self._changed: list[tuple[nn.Module, str, Any, Any]] = []
        self._hooks: dict[nn.Module, set[int]] = {}

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Note which attributes of `module` and of the modules inside it the block changes, and which
        hooks it adds."""
        before = [(inner, dict(vars(inner)), _hook_keys(inner)) for inner in module.modules()]
        yield
        for inner, values, keys in before:
            self._hooks.setdefault(inner, set()).update(_hook_keys(inner) - keys)
            for key, value in values.items():
                now = vars(inner).get(key)
                plain = isinstance(value, _PLAIN) and isinstance(now, _PLAIN)
                if now != value if plain else now is not value:
                    self._changed.append((inner, key, value, now))

    def copy_attributes(self) -> None:
        """Copy the attributes of the original parameters to those in their place."""
        for module, name, parameter, _ in self._parameters:
            vars(module._parameters[name]).update(vars(parameter))

    @torch.no_grad()
    def let_go(self) -> None:
        """Once sharded: note what was added, and free the whole parameters' memory."""
        self._added = [(module, set(vars(module)) - keys) for module, _, keys in self._modules]
        for module, name, parameter, _ in self._parameters:
            if module._parameters[name] is not parameter:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within the block, modules have the classes, hooks and attributes of before; parameters stay cut."""
        kinds = [type(module) for module, _, _ in self._modules]
        tables = [
            (table, OrderedDict(table))
            for module, _, _ in self._modules
            for name, table in vars(module).items()
            if "_hooks" in name and isinstance(table, OrderedDict)
        ]
        taken = [(m, {key: vars(m).pop(key) for key in added if key in vars(m)}) for m, added in self._added]
        for module, key, before, _ in self._changed:
            setattr(module, key, before)
        for module, kind, _ in self._modules:
            module.__class__ = kind
            _remove_hooks(module, self._hooks.get(module, ()))
        try:
            yield
        finally:
            for (module, _, _), kind in zip(self._modules, kinds, strict=True):
                module.__class__ = kind
            for table, entries in tables:
                table.clear()
                table.update(entries)
            for module, values in taken:
                vars(module).update(values)
            for module, key, _, now in self._changed:
                setattr(module, key, now)

    @contextmanager
    def whole_copy(self, gather: Callable[[Tensor], Tensor] = whole) -> Iterator[nn.Module]:
        """A copy of the whole model. Collective.

        Args:
            gather: a parameter or buffer in its place -> the whole of it.
        """
        values = {tensor: gather(tensor) for _, tensor in tensors_of(self._model)}
        with self.undone():
            unsharded = copy_with(self._model, values)
        values.clear()
        yield unsharded

    @torch.no_grad()
    def restore(self, gather: Callable[[Tensor], Tensor] = whole) -> None:
        """The same parameter objects, filled; the same classes and hooks. Collective.

        Args:
            gather: a parameter or buffer in its place -> the whole of it.
        """
        full: dict[int, Any] = {}
        for module, name, parameter, device in self._parameters:
            current: Any = module._parameters[name]
            if id(parameter) not in full:
                full[id(parameter)] = filled(parameter, gather(current).detach().to(device))
            module._parameters[name] = full[id(parameter)]
        for module, name, device in self._buffers:
            buffer = module._buffers[name]
            if buffer is None:
                continue
            if id(buffer) not in full:
                full[id(buffer)] = _filled_buffer(buffer, gather(buffer)).to(device)
            module._buffers[name] = full[id(buffer)]
        for module, kind, _ in self._modules:
            module.__class__ = kind
            _module_state_mapping.pop(module, None)
            _remove_hooks(module, self._hooks.get(module, ()))
        for module, added in self._added:
            for key in added:
                vars(module).pop(key, None)
        for module, key, before, _ in self._changed:
            setattr(module, key, before)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def filled(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """`parameter` holding `data`; another in its place where it came without memory."""
    if parameter.is_meta:
        filled = nn.Parameter(data, parameter.requires_grad)
        vars(filled).update(vars(parameter))
        return filled
    parameter.data, parameter.grad = data, None
    return parameter


def _filled_buffer(buffer: Tensor, data: Tensor) -> Tensor:
    """`buffer` holding `data`; another in its place where it came without memory."""
    if buffer.is_meta:
        return data
    if data.data_ptr() != buffer.data_ptr():
        assign_values(buffer, data)
    return buffer


def _own(tensors: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _hook_tables(module: nn.Module) -> dict[str, OrderedDict[int, Any]]:
    tables = {name: table for name, table in vars(module).items() if isinstance(table, OrderedDict)}
    return {name: table for name, table in tables.items() if name.endswith("_hooks")}


def _hook_keys(module: nn.Module) -> set[int]:
    return {key for table in _hook_tables(module).values() for key in table}


def _remove_hooks(module: nn.Module, keys: Collection[int]) -> None:
    """Remove the hooks of a sharded model: those with `keys`, and those recognized by their module."""
    for name, table in _hook_tables(module).items():
        for key, hook in list(table.items()):
            function = getattr(hook, "hook", hook)
            if key in keys or str(getattr(function, "__module__", "")).startswith(_ADDED_BY):
                for same in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                    getattr(module, same, {}).pop(key, None)
