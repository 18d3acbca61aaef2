"""State of callbacks, of the loss and of other functions of a script, brought from rank 0 of started ranks.

What training has changed returns: attributes of objects, and what functions capture, that is variables of the
functions around them, and globals that they name.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from distributed.interfaces.task import Task
from distributed.training.loss_parameters import has_parameters
from distributed.training.refilling import digest, functions, is_imported, parts, pickle_into, refill

__all__ = ["LeftObjects", "module_globals", "take_globals", "take_objects"]

logger = logging.getLogger("distributed")

_FILE = "objects.bin"


class LeftObjects:
    """Notes what the objects of `task` hold before training, and leaves what has changed."""

    def __init__(self, task: Task) -> None:
        self._task, known = task, _known(task)
        self._before = {place: digest(value, known) for place, value in self._values()}

    def leave(self, folder: Path) -> None:
        """Leave what has changed in `folder`, each by itself: one that cannot be pickled does not take the
        others with it."""
        found: dict[tuple[str, str], bytes | None] = {}
        known = _known(self._task)  # sharding replaces parameters
        for place, value in self._values():
            now, before = digest(value, known), self._before.get(place, b"")
            if before is not None and now != before:
                file = io.BytesIO()
                found[place] = file.getvalue() if now and pickle_into(file, value, known) else None
        with suppress(OSError):  # reported where the weights are left
            (folder / _FILE).write_bytes(pickle.dumps(found))

    def _values(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, holder in _holding(self._task):
            yield from (((name, part), value) for part, value in parts(holder).items())


def _load(data: bytes, known: Mapping[str, Any]) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def module_globals(task: Task) -> dict[tuple[str, str], bytes]:
    """Globals that functions of modules name, pickled, for ranks that import the modules anew."""
    found, known = {}, _known(task)
    for name, holder in _holding(task):
        function = getattr(holder, "__func__", holder)
        if isinstance(function, FunctionType) and is_imported(function):
            for part, value in parts(function).items():
                file = io.BytesIO()
                if pickle_into(file, value, known):
                    found[name, part] = file.getvalue()
    return found


def take_globals(task: Task, found: Mapping[tuple[str, str], bytes]) -> None:
    """Let the modules of a rank hold what `module_globals` returned in the caller's process."""
    own, holders = dict(_shared(task)), dict(_holding(task))
    for (name, part), data in found.items():
        function = getattr(holders[name], "__func__", holders[name])
        refill(parts(function), {part: _load(data, own)})


def take_objects(task: Task, folder: Path) -> None:
    """Give the caller's callbacks, loss and functions what rank 0 left in `folder`. Lists, dicts, tensors,
    modules and other objects that they held before are filled in place."""
    path = folder / _FILE
    if not path.exists():
        return
    own, holders, lost = dict(_shared(task)), dict(_holding(task)), []
    for (name, part), data in pickle.loads(path.read_bytes()).items():
        if name not in holders:  # it was packed for the ranks
            continue
        if data is None:
            lost.append(f"{part} of {type(holders[name]).__name__}")
            continue
        refill(parts(holders[name]), {part: _load(data, own)})
    path.unlink()
    if lost:
        logger.warning(
            "%s cannot be pickled, and stays in this process as it was before training. Keep what the script"
            " reads after fit in other attributes",
            ", ".join(lost),
        )


def _holding(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, holder) of all, with the methods of those that are objects."""
    for name, holder in _holders(task):
        yield name, holder
        yield from ((f"{name}.{method}", function) for method, function in functions(holder))


def _holders(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, object) of what may keep something for the script."""
    yield from ((f"callbacks.{number}", callback) for number, callback in enumerate(task.callbacks))
    for name in ("loss_fn", "training_step", "validation_step"):
        if getattr(task, name) is not None:
            yield name, getattr(task, name)
    yield from ((f"metrics.{name}", metric) for name, metric in (task.metrics or {}).items())


def _known(task: Task) -> Callable[[Any], str | None]:
    """The name of what the caller and the ranks both have."""
    known = {id(value): name for name, value in _shared(task)}
    return lambda part: known.get(id(part))


def _shared(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, object) of what the caller and the ranks both have, and others may refer to."""
    for name in ("optimizer", "scheduler", "train_data"):
        if getattr(task, name) is not None:
            yield name, getattr(task, name)
    yield from _holders(task)
    if has_parameters(task.loss_fn, task.model):  # which return as those of the model do
        loss_fn: Any = task.loss_fn
        yield from ((f"loss tensor {name}", part) for name, part in loss_fn.named_parameters())
    if isinstance(task.model, nn.Module):
        yield from ((f"module {name}", part) for name, part in task.model.named_modules())
        yield from ((f"tensor {name}", part) for name, part in task.model.named_parameters())
        yield from ((f"tensor {name}", part) for name, part in task.model.named_buffers())
    elif task.model is not None:
        yield "model", task.model
