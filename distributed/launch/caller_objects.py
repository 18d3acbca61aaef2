"""The caller's model, optimizer and scheduler around a run in started ranks: what they hold at its start is
trained, and at its end they hold what training left."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.chunk_index import ITEM_SIZES
from distributed.checkpoint.codec import encode
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.interfaces.collectives import OneRank
from distributed.interfaces.framework import Framework
from distributed.interfaces.state import BackendState
from distributed.interfaces.task import Progress, Task
from distributed.system.disk_room import needs_room, readable
from distributed.system.host_memory import host_memory

__all__ = ["bring", "take_back"]

logger = logging.getLogger("distributed")


class _Caller(OneRank):
    """The caller's process as the only rank, which saves what its objects hold."""

    def __init__(self, state: BackendState) -> None:
        self._state = state

    def export_state(self) -> BackendState:
        return self._state


def bring(task: Task, framework: Framework, folder: Path) -> AbstractContextManager[None]:
    """Save in `folder` what the caller's objects hold, where ranks would not have it otherwise: an optimizer
    with a history, and everything that has changed since an earlier `fit` brought it back.

    Returns:
        A context in which `task` is pickled without what ranks read from files.

    Raises:
        UserError: the optimizer has a history, and its state of the earlier `fit` did not return to it.
    """
    held, task.held = task.held, None
    if not framework.is_model(task.model):
        return nullcontext()
    optimizer = framework.optimizer_of(task.model, task.optimizer)
    has_history = framework.has_history(optimizer)
    if held is not None and held["is_apart"]:
        if has_history:
            raise _ambiguous(optimizer)
        optimizer = None
    if task.state_dir is None:
        changed = has_history
    else:
        same = held is not None and held["settings"] == _settings(task, framework)
        changed = not same or not framework.holds(PortableReader(task.state_dir), task.model, optimizer)
    if changed:
        given = {"scheduler": task.scheduler.state_dict()} if _has_state(task.scheduler) else {}
        store = PortableCheckpointer(str(folder / "given"), keep_last=None)
        extra = {"progress": asdict(Progress()), "given": given}
        ranks: Any = _Caller(framework.state_of(task.model, optimizer))
        with needs_room("what the script's objects hold, which ranks read from a file", folder):
            task.given_dir = store.save(ranks, extra, {})
    return framework.without_history(optimizer) if has_history else nullcontext()


def take_back(reader: PortableReader, task: Task, framework: Framework) -> dict[str, Any]:
    """Put what training left into the caller's objects.

    Returns:
        `Task.held` of the next `fit`.
    """
    optimizer = framework.optimizer_of(task.model, task.optimizer)
    reason = _lack_of_memory(reader) if optimizer is not None else None
    if reason is None:
        try:
            framework.load_state(reader, task.model, optimizer)
        except UserError as error:
            reason = str(error)
    if reason is not None:
        framework.load_weights(reader, task.model)
        logger.warning(
            "the weights have returned, and the script's optimizer is as it was before training: %s. Another"
            " fit of this Trainer continues with the state that training left; for another Trainer, save"
            " checkpoints (checkpoint_dir) and resume from them",
            reason,
        )
    scheduler = reader.extra.get("scheduler")
    if scheduler is not None and _has_state(task.scheduler):
        task.scheduler.load_state_dict(scheduler)
    return {"settings": _settings(task, framework), "is_apart": reason is not None}


def _lack_of_memory(reader: PortableReader) -> str | None:
    """Why this process cannot hold the optimizer's state, if it cannot."""
    shapes = reader.tensors().items()
    sizes = [
        prod(s) * ITEM_SIZES[reader.dtype(*place)] for place, s in shapes if place[0].startswith("optimizer.")
    ]
    room = host_memory()
    if sum(sizes) < room.nbytes:
        return None
    return f"its state has {readable(sum(sizes))}, and {room.limit} leaves {readable(room.nbytes)}"


def _ambiguous(optimizer: Any) -> UserError:
    return UserError(
        "the state of the optimizer did not return to this process after the last fit, and it holds another"
        " one now: it cannot be seen which of the two is meant",
        field="optimizer",
        got=f"{type(optimizer).__name__} with state",
        allowed="an optimizer without state, with which the training continues",
        remedy="Clear it (optimizer.state.clear()) to continue, or give it to a new Trainer to begin with it",
    )


def _has_state(scheduler: Any) -> bool:
    return hasattr(scheduler, "state_dict") and not isinstance(scheduler, type)


def _settings(task: Task, framework: Framework) -> dict[str, Any]:
    """What the caller's optimizer and scheduler hold beside tensors, as plain data."""
    optimizer = framework.optimizer_of(task.model, task.optimizer)
    found = None if optimizer is None else framework.settings_of(task.model, optimizer)
    scheduler = task.scheduler.state_dict() if _has_state(task.scheduler) else None
    plain: dict[str, Any] = encode({"optimizer": found, "scheduler": scheduler}, "scheduler")
    return plain
