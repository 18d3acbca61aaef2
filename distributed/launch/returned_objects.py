"""Attributes of callbacks and of the loss, brought from rank 0 of started ranks to the caller."""

from __future__ import annotations

import io
import logging
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from distributed.interfaces.task import Task
from distributed.training.loss_parameters import has_parameters

__all__ = ["leave_objects", "refill", "take_objects"]

logger = logging.getLogger("distributed")

_FILE = "objects.bin"


def leave_objects(task: Task, folder: Path) -> None:
    """Leave the attributes of the callbacks and the loss of `task` in `folder`, each by itself: one that
    cannot be pickled does not take the others with it."""
    known = {id(value): name for name, value in _shared(task)}
    found = [
        {name: _pickled(value, known) for name, value in _attributes(holder).items()}
        for holder in _holders(task)
    ]
    with suppress(OSError):  # reported where the weights are left
        (folder / _FILE).write_bytes(pickle.dumps(found))


def take_objects(task: Task, folder: Path) -> None:
    """Give the caller's callbacks and loss what rank 0 left in `folder`: lists, dicts, tensors and modules
    that they held before are filled in place."""
    path = folder / _FILE
    if not path.exists():
        return
    own, lost = dict(_shared(task)), []
    for holder, found in zip(_holders(task), pickle.loads(path.read_bytes()), strict=True):
        for name, data in found.items():
            if data is None:
                lost += [f"{type(holder).__name__}.{name}"] * (getattr(holder, name, None) is not None)
                continue
            unpickler = pickle.Unpickler(io.BytesIO(data))
            unpickler.persistent_load = own.__getitem__  # type: ignore[method-assign]
            _set(holder, name, unpickler.load())
    path.unlink()
    if lost:
        logger.warning(
            "%s cannot be pickled, and stays in the caller's object as it was before training. Keep what the"
            " script reads after fit in other attributes",
            ", ".join(lost),
        )


def _holders(task: Task) -> list[Any]:
    return [*task.callbacks, *([task.loss_fn] if hasattr(task.loss_fn, "__dict__") else [])]


def _attributes(holder: Any) -> Mapping[str, Any]:
    return {} if isinstance(holder, type) or callable(getattr(holder, "__code__", None)) else vars(holder)


def _shared(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, object) of what the caller and the ranks both have, and callbacks may refer to."""
    for name in ("optimizer", "scheduler", "loss_fn", "training_step", "validation_step", "train_data"):
        if getattr(task, name) is not None:
            yield name, getattr(task, name)
    for number, callback in enumerate(task.callbacks):
        yield f"callbacks.{number}", callback
    if has_parameters(task.loss_fn, task.model):  # which return as those of the model do
        loss_fn: Any = task.loss_fn
        yield from ((f"loss tensor {name}", part) for name, part in loss_fn.named_parameters())
    if isinstance(task.model, nn.Module):
        yield from ((f"module {name}", part) for name, part in task.model.named_modules())
        yield from ((f"tensor {name}", part) for name, part in task.model.named_parameters())
        yield from ((f"tensor {name}", part) for name, part in task.model.named_buffers())
    elif task.model is not None:
        yield "model", task.model


def _pickled(value: Any, known: Mapping[int, str]) -> bytes | None:
    file = io.BytesIO()
    pickler = cloudpickle.Pickler(file, protocol=5)
    pickler.persistent_id = lambda part: known.get(id(part))
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - whatever an object of the user raises
        return None
    return file.getvalue()


def _set(holder: Any, name: str, value: Any) -> None:
    own = getattr(holder, name, None)
    if own is not value and not refill(own, value):
        setattr(holder, name, value)


def refill(own: Any, value: Any) -> bool:
    """Let the object `own` hold what `value` does; False if it cannot."""
    if type(own) is not type(value):
        return False
    if isinstance(own, (list, deque, set, dict)):
        held = list(value.items()) if isinstance(value, dict) else list(value)
        own.clear()
        own.update(held) if isinstance(own, (set, dict)) else own.extend(held)
        return True
    if isinstance(own, torch.Tensor) and own.shape == value.shape and own.dtype == value.dtype:
        with torch.no_grad():
            own.copy_(value)
        return True
    if isinstance(own, nn.Module):
        with suppress(RuntimeError):
            own.load_state_dict(value.state_dict())
            return True
    return False
