"""Restore a model after DeepSpeed, which leaves hooks, dictionaries and attributes behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Before:
    """Snapshot of `model`'s modules and parameters, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(m, type(m), dict(vars(m)), _tables(m)) for m in model.modules()]
        self._parameters = [(p, set(vars(p)), p.dtype, p.device) for p in model.parameters()]
        self._buffers = [
            (m, n, b.device) for m in model.modules() for n, b in m._buffers.items() if b is not None
        ]

    @torch.no_grad()
    def restore(self, whole: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Restore the same objects; parameters get the values of `whole`, one by one."""
        places: dict[Tensor, Any] = {p: (dtype, device) for p, _, dtype, device in self._parameters}
        data = {}
        for parameter, value in whole:
            dtype, device = places[parameter]
            data[parameter] = value.to(device, dtype)
        self._undo()
        for parameter, keys, _, device in self._parameters:
            for key in set(vars(parameter)) - keys:
                delattr(parameter, key)
            parameter.data = data[parameter] if parameter in data else parameter.data.to(device)
            parameter.grad = None
        for module, name, device in self._buffers:
            module._buffers[name] = module._buffers[name].to(device)  # type: ignore[union-attr]

    def _undo(self) -> None:
        """Give modules the classes, hooks and attributes of before."""
        for module, kind, values, tables in self._modules:
            module.__class__ = kind
            for key in set(vars(module)) - set(values):
                del vars(module)[key]
            # ZeRO-3 puts its own dictionary of parameters in the place of torch's.
            vars(module)["_parameters"] = values["_parameters"]
            for name, entries in tables.items():
                table = vars(module)[name]
                for key in [key for key in table if key not in entries]:
                    del table[key]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within the block, modules have the classes, hooks and attributes of before; parameters stay cut."""
        states = [(module, type(module), dict(vars(module))) for module, *_ in self._modules]
        marks = [
            (p, {key: vars(p).pop(key) for key in set(vars(p)) - keys}) for p, keys, *_ in self._parameters
        ]
        entries = [
            (table, dict(table))
            for module, _, _, tables in self._modules
            for table in (vars(module)[name] for name in tables)
        ]
        self._undo()
        try:
            yield
        finally:
            for module, kind, values in states:
                module.__class__ = kind
                vars(module).update(values)
            for table, found in entries:
                table.clear()
                table.update(found)
            for parameter, attributes in marks:
                vars(parameter).update(attributes)


def _tables(module: nn.Module) -> dict[str, set[Any]]:
    """Hooks of `module` by table."""
    return {
        name: set(table)
        for name, table in vars(module).items()
        if "_hooks" in name and hasattr(table, "keys")
    }
