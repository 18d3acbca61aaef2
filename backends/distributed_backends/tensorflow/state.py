"""Keras models and optimizers to and from the neutral form of checkpoints, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from distributed.checkpoint.torch_state import MODEL, check_shapes, stored_names
from distributed.errors import UserError
from distributed.interfaces.state import BackendState, Chunk, StateReader
from distributed_backends.tensorflow.values import to_array

_OWN = ("iteration", "learning_rate")


def named_variables(model: Any) -> dict[str, Any]:
    """Weights and statistics by name, ``layer/kernel``, each once.

    Keras numbers layers over the whole process (``dense_7``); here they are numbered within their
    parent, so that a script which built another model before gives the same names. States of
    random layers are left out: they follow from seed, rank and step.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, variable in _walk(model, "", set()):
        if id(variable) not in seen:
            seen.add(id(variable))
            found[_free(name, found)] = variable
    rest = [*model.trainable_variables, *model.non_trainable_variables]
    for variable in rest:
        if id(variable) not in seen and variable.name != "seed_generator_state":
            seen.add(id(variable))
            found[_free(variable.name, found)] = variable
    return found


def _walk(layer: Any, prefix: str, done: set[int]) -> Iterator[tuple[str, Any]]:
    if id(layer) in done:
        return
    done.add(id(layer))
    for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
        yield prefix + variable.name, variable
    numbers: dict[str, int] = {}
    for child in getattr(layer, "_layers", ()):
        base = _base(child)
        count = numbers[base] = numbers.get(base, -1) + 1
        yield from _walk(child, f"{prefix}{base}{f'_{count}' if count else ''}/", done)


def _base(layer: Any) -> str:
    """A layer's name without the number that Keras gave it."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(layer).__name__).lower()
    plain: str = re.sub(r"_\d+$", "", layer.name)
    return plain if plain.replace("_", "") == snake.replace("_", "") else str(layer.name)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _slots(optimizer: Any, order: list[str]) -> Iterator[tuple[str, str, Any]]:
    """(key in a checkpoint such as ``optimizer.momentums``, name of the weight, variable); `order` has the
    names of the weights in the optimizer's order."""
    for attribute, value in vars(optimizer).items():
        plain = attribute not in ("_trainable_variables", "_variables")
        if plain and isinstance(value, list) and len(value) == len(order):
            if any(item is not None and not hasattr(item, "assign") for item in value):
                continue
            for name, variable in zip(order, value, strict=True):
                if variable is not None:
                    yield f"optimizer.{attribute.strip('_')}", name, variable


# -- out -----------------------------------------------------------------------------------


def export_keras(
    model: Any, holder: Any, scaler: dict[str, Any] | None, rank: int, size: int
) -> BackendState:
    """The share of one of `size` ranks that hold the same, copied to the CPU. Without collectives.

    Args:
        holder: of the optimizer, or None to leave it out.
    """
    named = named_variables(model)
    trained = {id(v) for v in model.trainable_variables}
    state = BackendState(scaler=scaler)
    for name, variable in named.items():
        whole = id(variable) not in trained
        state.chunks += _cut(name, MODEL, variable, 0 if whole else rank, 1 if whole else size, rank)
    if holder is None:
        return state
    optimizer = holder.keras
    names = {id(variable): name for name, variable in named.items()}
    order = [names[id(v)] for v in model.trainable_variables]
    covered: set[int] = set()
    for key, name, variable in _slots(optimizer, order):
        covered.add(id(variable))
        state.chunks += _cut(name, key, variable, rank, size, rank)
    state.groups = [
        {
            "names": order,
            "lr": float(holder.param_groups[0]["lr"]),
            "initial_lr": float(holder.param_groups[0].get("initial_lr", holder.param_groups[0]["lr"])),
            "optimizer": type(optimizer).__name__,
            "iterations": int(to_array(optimizer.iterations)),
            "numbers": [float(to_array(v)) for v in _numbers(optimizer, covered)],
        }
    ]
    return state


def _numbers(optimizer: Any, covered: set[int]) -> list[Any]:
    """Variables of the optimizer as a whole, such as Nadam's product of momenta."""
    left = [v for v in optimizer.variables if id(v) not in covered and v.name not in _OWN]
    large = [v.path for v in left if v.shape]
    if large:
        raise UserError(
            f"the optimizer keeps state that is not of a parameter: {', '.join(large)}",
            field="optimizer",
            got=type(optimizer).__name__,
            remedy="Use another optimizer, or no checkpoint_dir",
        )
    return left


def _cut(name: str, key: str, variable: Any, part: int, parts: int, rank: int) -> list[Chunk]:
    """Slice `part` of `parts`, or nothing when the slice is empty and another rank has one."""
    shape = tuple(variable.shape)
    length = int(np.prod(shape, dtype=np.int64))
    start, end = length * part // parts, length * (part + 1) // parts
    if rank != 0 and (start == end or parts == 1):
        return []
    return [Chunk(name, key, shape, start, as_torch(variable)[start:end].clone())]


def as_torch(variable: Any) -> torch.Tensor:
    """The values of a variable, flat, in a tensor of their own."""
    array = np.ascontiguousarray(to_array(variable)).reshape(-1)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


# -- in ------------------------------------------------------------------------------------


def import_keras(reader: StateReader, model: Any, holder: Any) -> None:
    """Fill model and optimizer in place from what any number of ranks saved.

    Raises:
        UserError: names, shapes or the kind of optimizer differ, or stored bytes are damaged.
    """
    named = named_variables(model)
    stored = stored_names(reader, named, {})
    check_shapes(reader, named, stored, {}, {})
    group = _saved_group(reader, holder.keras)
    _fill(reader, named, stored)
    names = {id(variable): stored[name] for name, variable in named.items()}
    optimizer, tensors = holder.keras, reader.tensors()
    order = [names[id(v)] for v in model.trainable_variables]
    covered: set[int] = set()
    for key, name, variable in _slots(optimizer, order):
        covered.add(id(variable))
        if (key, name) in tensors:
            _assign(variable, reader.read(key, name))
    for variable, number in zip(_numbers(optimizer, covered), group["numbers"], strict=True):
        variable.assign(number)
    optimizer.iterations.assign(group["iterations"])
    holder.param_groups[0]["lr"] = group["lr"]
    holder.param_groups[0]["initial_lr"] = group["initial_lr"]


def fill_model(reader: StateReader, model: Any) -> None:
    """Put the saved model, not the optimizer, into `model`, in place.

    Raises:
        UserError: names or shapes differ, or stored bytes are damaged.
    """
    named = named_variables(model)
    stored = stored_names(reader, named, {})
    check_shapes(reader, named, stored, {}, {})
    _fill(reader, named, stored)


def _fill(reader: StateReader, named: Mapping[str, Any], stored: Mapping[str, str]) -> None:
    for name, variable in named.items():
        _assign(variable, reader.read(MODEL, stored[name]))


def _assign(variable: Any, value: torch.Tensor) -> None:
    if value.dtype == torch.bfloat16:
        value = value.float()
    variable.assign(value.numpy().reshape(tuple(variable.shape)))


def _saved_group(reader: StateReader, optimizer: Any) -> Mapping[str, Any]:
    groups = reader.groups
    kind = type(optimizer).__name__
    saved = groups[0].get("optimizer") if groups else None
    if saved is None:
        raise UserError(
            "the checkpoint holds no Keras optimizer's state",
            remedy="Resume from a checkpoint of backend 'tensorflow'",
        )
    if saved != kind:
        raise UserError(
            "the checkpoint was saved with another kind of optimizer",
            field="optimizer",
            got=kind,
            allowed=str(saved),
            remedy="Use the optimizer of the checkpoint",
        )
    return groups[0]
