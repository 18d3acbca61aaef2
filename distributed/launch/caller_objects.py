"""The caller's model, optimizer and scheduler around a run in started ranks: what they hold at its start is
trained, and at its end they hold what training left."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.codec import encode
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.interfaces.framework import Framework
from distributed.interfaces.placement import World
from distributed.interfaces.state import BackendState
from distributed.interfaces.task import Progress, Task
from distributed.training.loss_parameters import with_loss

__all__ = ["bring", "take_back"]

logger = logging.getLogger("distributed")


class _Caller:
    """The caller's process as the only rank, which saves what its objects hold."""

    world = World()

    def __init__(self, state: BackendState) -> None:
        self._state = state

    def export_state(self) -> BackendState:
        return self._state

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def bring(task: Task, framework: Framework, folder: Path) -> AbstractContextManager[None]:
    """Save in `folder` what the caller's objects hold, where ranks would not have it otherwise: an optimizer
    with a history, and everything that has changed since an earlier `fit` brought it back.

    Returns:
        A context in which `task` is pickled without what ranks read from files.
    """
    held, task.held = task.held, None
    if not framework.is_model(task.model):
        return nullcontext()
    has_history = framework.has_history(task.optimizer)
    if task.state_dir is None:
        changed = has_history
    else:
        same = held is not None and held == _settings(task, framework)
        changed = not same or not framework.holds(
            PortableReader(task.state_dir), with_loss(task.model, task.loss_fn), task.optimizer
        )
    if changed:
        state = framework.state_of(with_loss(task.model, task.loss_fn), task.optimizer)
        scheduler = task.scheduler.state_dict() if hasattr(task.scheduler, "state_dict") else None
        given = {} if scheduler is None else {"scheduler": scheduler}
        store = PortableCheckpointer(str(folder / "given"), keep_last=None)
        extra = {"progress": asdict(Progress()), "given": given}
        task.given_dir = store.save(_Caller(state), extra, {})  # type: ignore[arg-type]  # one rank is enough
    return framework.without_history(task.optimizer) if has_history else nullcontext()


def take_back(reader: PortableReader, task: Task, framework: Framework) -> dict[str, Any]:
    """Put what training left into the caller's objects.

    Returns:
        `Task.held` of the next `fit`.
    """
    try:
        framework.load_state(reader, with_loss(task.model, task.loss_fn), task.optimizer)
    except UserError as error:
        framework.load_weights(reader, with_loss(task.model, task.loss_fn))
        logger.warning("the caller's optimizer was left as it was before training: %s", error)
    scheduler = reader.extra.get("scheduler")
    if scheduler is not None and hasattr(task.scheduler, "load_state_dict"):
        task.scheduler.load_state_dict(scheduler)
    return _settings(task, framework)


def _settings(task: Task, framework: Framework) -> dict[str, Any]:
    """What the caller's optimizer and scheduler hold beside tensors, as plain data."""
    found = framework.settings_of(with_loss(task.model, task.loss_fn), task.optimizer)
    scheduler = task.scheduler.state_dict() if hasattr(task.scheduler, "state_dict") else None
    plain: dict[str, Any] = encode({"optimizer": found, "scheduler": scheduler}, "scheduler")
    return plain
