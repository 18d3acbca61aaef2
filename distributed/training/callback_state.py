"""State of objects that have no ``state_dict`` of their own: what training has changed of their attributes or
variables, as data that a checkpoint can hold."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from distributed.checkpoint.codec import encode
from distributed.checkpoint.dtensor import local_part
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.system.tensors import digest_of
from distributed.training.refilling import (
    GENERATORS,
    digest,
    is_plain,
    random_state,
    refill,
    set_random_state,
)

__all__ = [
    "ATTRIBUTES",
    "copy_of_model",
    "fingerprint",
    "is_data",
    "named_by_value",
    "restore_attributes",
    "save_attributes",
]

ATTRIBUTES = "attributes of the callback"
"""Key of the state of a callback that `save_attributes` made."""
_OWN = "distributed."
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, tuple, set, frozenset, dict, deque, OrderedDict, defaultdict, Counter)
_SAMPLED = 2**20
"""Bytes of a tensor from which on not all elements are read to see if it has changed."""
_NUM_SAMPLES = 2**16
_MAX_DEPTH = 8
"""Kind of generator -> functions that read and write its state."""


def fingerprint(value: Any, live: Mapping[int, Any], memo: dict[int, Any]) -> Any:
    """Return what differs if `value` does.

    Args:
        live: objects by ``id`` to which references are no state.
        memo: fingerprints of what several holders share, filled here.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if id(value) in live:
        return id(value)
    if id(value) not in memo:
        memo[id(value)] = value, _fingerprint(value, live)
    return memo[id(value)][1]


def save_attributes(
    held: Mapping[str, Any], names: Collection[str], live: Mapping[int, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Make what is `held` by `names` into what a checkpoint can hold.

    Returns:
        an entry for each, and the names of those that a checkpoint cannot hold. References to what is `live`
        are neither.
    """
    found, lost = {}, []
    for name in names:
        try:
            entry = _entry(held[name], live.keys())
        except UserError:
            lost.append(name)
            continue
        if entry is not None:
            found[name] = entry
    return found, lost


def restore_attributes(
    held: MutableMapping[str, Any],
    saved: Mapping[str, Any],
    owner: str,
    device: str,
    make: Callable[[], Any] | None = None,
) -> None:
    """Let the attributes or variables `held` have the values that `save_attributes` found. Values, lists and
    dicts are filled in place.

    Args:
        owner: whose they are, for messages.
        device: where tensors are put that were on one.
        make: returns an object that is made while training. Collective.

    Raises:
        UserError: an object can be made in no known way.
    """
    for name, entry in saved.items():
        own: Any = held.get(name)
        value = entry["value"]
        value = _moved(value, device) if entry["on_device"] else value
        if entry["kind"] == "value" and isinstance(value, Tensor) and getattr(held, "replaces", False):
            held[name] = value
        elif entry["kind"] == "value":
            refill(held, {name: value})
        elif entry["kind"] == "parts" and is_plain(own):
            restore_attributes(vars(own), value, owner, device, make)
        else:
            held[name] = _restored(own, entry["kind"], value, make, f"{owner}.{name}")


def _restored(own: Any, kind: str, value: Any, make: Callable[[], Any] | None, name: str) -> Any:
    """Return `own` with a state, or what has been made for it."""
    try:
        if kind == "generator":
            set_random_state(own, value)
            return own
        if kind == "member":
            return type(own)[value]
        if kind == "state" and not hasattr(own, "load_state_dict") and make is not None:
            own = make()
        own.load_state_dict(value)
        return own
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError, StopIteration) as error:
        raise UserError(
            f"{name} cannot be restored: it is made while training, and is no copy of the model",
            field="resume_from_checkpoint",
            got=type(own).__name__,
            remedy="Make it in __init__, or give its owner, if a callback, state_dict and load_state_dict",
        ) from error


def is_data(value: Any, largest: int | None = None, depth: int = 0) -> bool:
    """True if `value` is of a kind that a checkpoint can hold, and no result of a forward pass.

    Args:
        largest: bytes that a tensor or an array may have.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        small = largest is None or value.nbytes < largest
        return small and getattr(value, "grad_fn", None) is None
    if type(value) in _PLAIN or isinstance(value, (Enum, np.generic, *GENERATORS)):
        return True
    if depth == _MAX_DEPTH or not (type(value) in _CONTAINERS or is_plain(value)):
        return False
    held = value if type(value) in _CONTAINERS else vars(value)
    return all(
        is_data(part, largest, depth + 1) for part in (held.values() if isinstance(held, dict) else held)
    )


def _entry(value: Any, around: Collection[int]) -> dict[str, Any] | None:
    """Return what a checkpoint holds of `value`; None for a reference to what is `around`."""
    parts = value.modules() if isinstance(value, nn.Module) else _parts(value)
    if type(value).__module__.startswith(_OWN) or any(id(part) in around for part in parts):
        return None
    content, state = value, random_state(value)
    if state is not None:
        kind, content = "generator", state
    elif isinstance(value, Enum):
        kind, content = "member", value.name
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        kind, content = "state", value.state_dict()
    elif is_plain(value):
        entries = {name: _entry(part, {*around, id(value)}) for name, part in vars(value).items()}
        found = {name: entry for name, entry in entries.items() if entry is not None}
        return {"kind": "parts", "on_device": False, "value": found}
    else:
        kind = "value"
    encode(content)
    on_device = any(isinstance(part, Tensor) and not part.is_cpu for part in _parts(content))
    return {"kind": kind, "on_device": on_device, "value": _copied(content)}


def _copied(value: Any) -> Any:
    """A deep copy, also of tensors inside a graph."""
    graph = [part for part in _parts(value) if isinstance(part, Tensor)]
    return copy.deepcopy(value, {id(part): part.detach().clone() for part in graph})


def copy_of_model(all_ranks: bool, context: Context) -> Any:
    """A copy of the model, whole if all ranks make it."""
    if all_ranks or context.world.size == 1:
        with context.whole_model() as model:
            return copy.deepcopy(model)
    return copy.deepcopy(context.model)


def named_by_value(live: Mapping[int, Any]) -> Callable[[Any], str | None]:
    """Return what names, in a digest, tensors by their values, and what is `live` or data by itself."""

    def name_of(part: Any) -> str | None:
        if id(part) in live or isinstance(part, (Dataset, DataLoader)):
            return str(id(part))
        if isinstance(part, Tensor):
            return _values_of(part)
        return str(id(part)) if type(part).__module__.startswith(_OWN) else None

    return name_of


def _fingerprint(value: Any, live: Mapping[int, Any]) -> Any:
    state = random_state(value)
    if state is not None:
        value = state
    elif type(value).state_dict is nn.Module.state_dict if isinstance(value, nn.Module) else False:
        value = value.state_dict(keep_vars=True)
    elif hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    return digest(value, named_by_value(live)) or repr(value)


def _values_of(tensor: Tensor) -> str:
    """Text that differs if the values do; of a large tensor, also if it is another one or was changed in
    place as a whole, for which some of its elements are read."""
    plain = local_part(tensor.detach())
    if plain.is_meta or plain.layout is not torch.strided:
        return f"{id(tensor)} {tensor._version}"
    if plain.nbytes < _SAMPLED:
        return digest_of((plain, tensor.requires_grad))
    version = 0 if tensor.is_inference() else tensor._version
    some = plain.flatten()[:: max(1, plain.numel() // _NUM_SAMPLES)]
    return digest_of((some, plain.shape, plain.data_ptr(), version))


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
