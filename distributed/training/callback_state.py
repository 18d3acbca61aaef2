"""State of callbacks that have no ``state_dict`` of their own: the attributes that training has changed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from distributed.checkpoint.codec import encode
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.training.refilling import digest, is_plain, refill

__all__ = ["ATTRIBUTES", "fingerprints", "restore_attributes", "save_attributes"]

ATTRIBUTES = "attributes of the callback"
"""Key of a state that `save_attributes` made."""
_OWN = "distributed."


def fingerprints(holder: Any) -> dict[str, Any]:
    """A value for each attribute that differs if the attribute does."""
    return {name: _fingerprint(value) for name, value in vars(holder).items()}


def save_attributes(
    callback: Any, names: Collection[str], context: Context
) -> tuple[dict[str, Any], list[str]]:
    """Make the attributes `names` of a callback into what a checkpoint can hold.

    Returns:
        an entry for each, and the names of those that a checkpoint cannot hold. References to what the run
        trains are neither.
    """
    model = context.model
    parts_of_model = [*model.modules(), *model.parameters()] if isinstance(model, nn.Module) else [model]
    live = {id(part) for part in (callback, context, context.optimizer, *parts_of_model)}
    found, lost = {}, []
    for name in names:
        try:
            entry = _entry(vars(callback)[name], live)
        except UserError:
            lost.append(name)
            continue
        if entry is not None:
            found[name] = entry
    return found, lost


def restore_attributes(holder: Any, saved: Mapping[str, Any], callback: Any, context: Context) -> None:
    """Give `callback`, or an object that it holds, the attributes that `save_attributes` found. Values, lists
    and dicts are filled in place. An object that the callback makes while training is made here as a copy of
    the model, if it was one. Collective for callbacks on all ranks.

    Raises:
        UserError: an object can be made in no known way.
    """
    for name, entry in saved.items():
        own: Any = getattr(holder, name, None)
        value = entry["value"]
        value = _moved(value, context.world.device) if entry["on_device"] else value
        if entry["kind"] == "value":
            refill(vars(holder), {name: value})
        elif entry["kind"] == "parts" and is_plain(own):
            restore_attributes(own, value, callback, context)
        else:
            if not hasattr(own, "load_state_dict") and entry["kind"] == "state":
                own = _copy_of_model(callback, context)
            try:
                own.load_state_dict(value)
            except (RuntimeError, ValueError, KeyError, AttributeError) as error:
                raise UserError(
                    f"{type(callback).__name__}.{name} cannot be restored: it is made while training, and is"
                    " no copy of the model",
                    field="callbacks",
                    got=type(callback).__name__,
                    remedy="Make it in __init__, or give the callback state_dict and load_state_dict",
                ) from error
            setattr(holder, name, own)


def _entry(value: Any, around: Collection[int]) -> dict[str, Any] | None:
    """Return what a checkpoint holds of `value`; None for a reference to what is `around`."""
    parts = value.modules() if isinstance(value, nn.Module) else _parts(value)
    if type(value).__module__.startswith(_OWN) or any(id(part) in around for part in parts):
        return None
    content = value
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        kind, content = "state", value.state_dict()
    elif is_plain(value):
        entries = {name: _entry(part, {*around, id(value)}) for name, part in vars(value).items()}
        found = {name: entry for name, entry in entries.items() if entry is not None}
        return {"kind": "parts", "on_device": False, "value": found}
    else:
        kind = "value"
    encode(content)
    on_device = any(isinstance(part, Tensor) and not part.is_cpu for part in _parts(content))
    return {"kind": kind, "on_device": on_device, "value": copy.deepcopy(content)}


def _copy_of_model(callback: Any, context: Context) -> Any:
    if callback.all_ranks or context.world.size == 1:
        with context.whole_model() as model:
            return copy.deepcopy(model)
    return copy.deepcopy(context.model)


def _fingerprint(value: Any) -> Any:
    if hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    return digest(value, _version) or repr(value)


def _version(part: Any) -> str | None:
    """Return the name of a tensor, or of an object of the run, in a fingerprint."""
    if isinstance(part, Tensor):
        return f"{id(part)} {part.data_ptr()} {part._version}"
    return str(id(part)) if type(part).__module__.startswith(_OWN) else None


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
