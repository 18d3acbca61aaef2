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
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distributed.interfaces.task import Task
from distributed.training.callback_state import named_by_value
from distributed.training.held_state import given_holders, inner_holders, shared
from distributed.training.refilling import digest, is_imported, parts, pickle_into, refill

if TYPE_CHECKING:
    from distributed.training.loop import TrainingLoop

__all__ = ["LeftObjects", "module_globals", "take_globals", "take_objects"]

logger = logging.getLogger("distributed")

_FILE = "objects.bin"


class LeftObjects:
    """Notes what the script's objects hold before the training of `loop`, and leaves what has changed."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._held = loop.callbacks.held
        self._given = list(given_holders(loop.task))
        self._names = {id(value): value for _, value in shared(loop.task)}
        self._before = {place: self._digest(value) for place, value in self._values()}

    def leave(self, folder: Path) -> None:
        """Leave what has changed in `folder`, each by itself: one that cannot be pickled does not take the
        others with it."""
        assert self._held is not None
        self._names |= self._held.live()  # sharding replaces parameters
        found: dict[tuple[str, str], bytes | None] = {}
        for place, value in self._values():
            now, before = self._digest(value), self._before.get(place, b"")
            if before is not None and now != before:
                found[place] = self._pickled(value) if now else None
        for holder, part, value in self._held.returning():
            data = self._pickled(value)
            if data is not None:
                found[holder, part] = data
        with suppress(OSError):  # reported where the weights are left
            (folder / _FILE).write_bytes(pickle.dumps(found))

    def _pickled(self, value: Any) -> bytes | None:
        assert self._held is not None
        file = io.BytesIO()
        return file.getvalue() if pickle_into(file, value, self._held.name_of) else None

    def _digest(self, value: Any) -> bytes | None:
        return digest(value, named_by_value(self._names))

    def _values(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, holder in self._given:
            yield from (((name, part), value) for part, value in parts(holder).items())


def _load(data: bytes, known: Mapping[str, Any]) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def module_globals(task: Task) -> dict[tuple[str, str], bytes]:
    """Globals that functions of modules name, pickled, for ranks that import the modules anew."""
    found, known = {}, _known(task)
    for name, holder in given_holders(task):
        function = getattr(holder, "__func__", holder)
        if isinstance(function, FunctionType) and is_imported(function):
            for part, value in parts(function).items():
                file = io.BytesIO()
                if pickle_into(file, value, known):
                    found[name, part] = file.getvalue()
    return found


def take_globals(task: Task, found: Mapping[tuple[str, str], bytes]) -> None:
    """Let the modules of a rank hold what `module_globals` returned in the caller's process."""
    own, holders = dict(shared(task)), dict(given_holders(task))
    for (name, part), data in found.items():
        function = getattr(holders[name], "__func__", holders[name])
        refill(parts(function), {part: _load(data, own)})


def take_objects(task: Task, folder: Path) -> None:
    """Give the caller's callbacks, loss and functions what rank 0 left in `folder`. Lists, dicts, tensors,
    modules and other objects that they held before are filled in place."""
    path = folder / _FILE
    if not path.exists():
        return
    own, lost = dict(shared(task)), []
    inner = dict(inner_holders(task, task.model, task.optimizer))
    given = dict(given_holders(task))
    for (name, part), data in pickle.loads(path.read_bytes()).items():
        if name not in inner and name not in given:  # it was packed for the ranks
            continue
        if data is None:
            lost.append(f"{part} of {type(given[name]).__name__}")
            continue
        held, value = inner[name] if name in inner else parts(given[name]), _load(data, own)
        if isinstance(value, Tensor) and getattr(held, "replaces", False):
            held[part] = value
        else:
            refill(held, {part: value})
    path.unlink()
    if lost:
        logger.warning(
            "%s cannot be pickled, and stays in this process as it was before training. Keep what the script"
            " reads after fit in other attributes",
            ", ".join(lost),
        )


def _known(task: Task) -> Callable[[Any], str | None]:
    """The name of what the caller and the ranks both have."""
    known = {id(value): name for name, value in shared(task)}
    return lambda part: known.get(id(part))
