"""State of callbacks that have no ``state_dict`` of their own: the attributes that training has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from distributed.checkpoint.codec import encode
from distributed.errors import UserError
from distributed.interfaces.callback import Context

__all__ = ["ATTRIBUTES", "attributes_of", "fingerprints", "restore_attributes"]

ATTRIBUTES = "attributes of the callback"
"""Key of a state that `attributes_of` made."""


def fingerprints(callback: Any) -> dict[str, str]:
    """What changes with each attribute: its values, or the versions of its tensors."""
    return {name: _fingerprint(value) for name, value in vars(callback).items()}


def attributes_of(callback: Any, before: Mapping[str, str], context: Context) -> dict[str, Any]:
    """The attributes that are not as `before`, as a checkpoint can hold them: values, and objects with
    ``state_dict`` and ``load_state_dict``, such as an averaged model. References to what the run trains, and
    other objects, are left out."""
    model = context.model
    parts_of_model = [*model.modules(), *model.parameters()] if isinstance(model, nn.Module) else [model]
    live = {id(part) for part in (context.optimizer, *parts_of_model)}
    found: dict[str, Any] = {}
    for name, value in vars(callback).items():
        if before.get(name) == _fingerprint(value):
            continue
        parts = value.modules() if isinstance(value, nn.Module) else _parts(value)
        if any(id(part) in live for part in parts):
            continue
        is_object = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        try:
            content = value.state_dict() if is_object else value
            encode(content, name)
        except UserError:
            continue
        on_device = any(isinstance(part, Tensor) and not part.is_cpu for part in _parts(content))
        found[name] = {"is_object": is_object, "on_device": on_device, "value": copy.deepcopy(content)}
    return found


def restore_attributes(callback: Any, saved: Mapping[str, Any], context: Context) -> None:
    """Give a callback the attributes that `attributes_of` found. An object that it makes while training is
    made here as a copy of the model, if it was one. Collective for callbacks on all ranks.

    Raises:
        UserError: an object can be made in no known way.
    """
    for name, entry in saved.items():
        value = _moved(entry["value"], context.world.device) if entry["on_device"] else entry["value"]
        if entry["is_object"]:
            own: Any = getattr(callback, name, None)
            if not hasattr(own, "load_state_dict"):
                own = _copy_of_model(callback, context)
            try:
                own.load_state_dict(value)
            except (RuntimeError, ValueError, KeyError) as error:
                raise UserError(
                    f"{type(callback).__name__}.{name} cannot be restored: it is made while training, and is"
                    " no copy of the model",
                    field="callbacks",
                    got=type(callback).__name__,
                    remedy="Make it in __init__, or give the callback state_dict and load_state_dict",
                ) from error
            value = own
        setattr(callback, name, value)


def _copy_of_model(callback: Any, context: Context) -> Any:
    if callback.all_ranks or context.world.size == 1:
        with context.whole_model() as model:
            return copy.deepcopy(model)
    return copy.deepcopy(context.model)


def _fingerprint(value: Any) -> str:
    if hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    if isinstance(value, Tensor):
        return f"{id(value)} {value.data_ptr()} {value._version}"
    if isinstance(value, Mapping):
        return repr([(repr(key), _fingerprint(part)) for key, part in value.items()])
    if isinstance(value, (list, tuple)):
        return repr([_fingerprint(part) for part in value])
    return repr(value)


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(part)


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(part, device) for key, part in value.items()}
    return type(value)(_moved(part, device) for part in value) if type(value) in (list, tuple) else value
