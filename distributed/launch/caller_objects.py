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
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.interfaces.collectives import OneRank
from distributed.interfaces.framework import Framework
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState
from distributed.interfaces.task import Progress, Task
from distributed.system.disk_room import needs_room, readable
from distributed.system.host_memory import host_memory
from distributed.system.tensors import digest_of
from distributed.training.loss_parameters import with_loss

__all__ = ["bring", "take_back"]

logger = logging.getLogger("distributed")


class _Caller(OneRank):
    """The caller's process as the only rank, which saves what its objects hold."""

    def __init__(self, state: BackendState) -> None:
        self._state = state

    def export_state(self) -> BackendState:
        return self._state


def bring(task: Task, framework: Framework, folder: Path, plan: RunPlan) -> AbstractContextManager[None]:
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
    is_replaced = held is not None and held["optimizer"] is None
    if is_replaced:
        task.optimizer = framework.build_optimizer(task, plan)
    model, optimizer = _model(task), framework.optimizer_of(task.model, task.optimizer)
    has_history, first = framework.has_history(optimizer), task.state_dir is None
    now = {} if first and not has_history else _digests(task, framework)
    if held is not None and held["is_apart"] and not is_replaced:
        if has_history or held["optimizer"] != now["optimizer"]:
            raise _ambiguous(optimizer)
        optimizer = None
    changed = has_history if first else held is None or any(held[name] != now[name] for name in now)
    if changed:
        given = {"scheduler": task.scheduler.state_dict()} if _has_state(task.scheduler) else {}
        store = PortableCheckpointer(str(folder / "given"), keep_last=None)
        extra = {"progress": asdict(Progress()), "given": given}
        ranks: Any = _Caller(framework.state_of(model, optimizer))
        with needs_room("what the script's objects hold, which ranks read from a file", folder):
            task.given_dir = store.save(ranks, extra, {})
    return framework.without_history(optimizer) if has_history else nullcontext()


def take_back(reader: PortableReader, task: Task, framework: Framework) -> dict[str, Any]:
    """Put what training left into the caller's objects.

    Returns:
        `Task.held` of the next `fit`.
    """
    model, optimizer = _model(task), framework.optimizer_of(task.model, task.optimizer)
    reason = _lack_of_memory(reader) if optimizer is not None else None
    if reason is None:
        try:
            framework.load_state(reader, model, optimizer)
        except UserError as error:
            reason = str(error)
    if reason is not None:
        framework.load_weights(reader, model)
        logger.warning(
            "the weights have returned, and the script's optimizer is as it was before training: %s. Another"
            " fit of this Trainer continues with the state that training left; for another Trainer, save"
            " checkpoints (checkpoint_dir) and resume from them",
            reason,
        )
    scheduler = reader.extra.get("scheduler")
    if scheduler is not None and _has_state(task.scheduler):
        task.scheduler.load_state_dict(scheduler)
    return {**_digests(task, framework), "is_apart": reason is not None}


def _lack_of_memory(reader: PortableReader) -> str | None:
    """Return the reason for which this process cannot hold the optimizer's state, if there is one."""
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
        "the state of the optimizer did not return to this process after the last fit, and the optimizer has"
        " been changed here since: it cannot be seen which of the two is meant",
        field="optimizer",
        got=type(optimizer).__name__,
        allowed="an optimizer without state and with the settings that it had, with which training continues",
        remedy="Undo the change (optimizer.state.clear()) to continue, or give it to a new Trainer",
    )


def _model(task: Task) -> Any:
    return with_loss(task.model, task.loss_fn)


def _has_state(scheduler: Any) -> bool:
    return hasattr(scheduler, "state_dict") and not isinstance(scheduler, type)


def _digests(task: Task, framework: Framework) -> dict[str, str]:
    """Digests of what the caller's objects hold now."""
    optimizer = framework.optimizer_of(task.model, task.optimizer)
    return {
        "model": framework.digest(_model(task)),
        "optimizer": "" if optimizer is None else framework.digest(optimizer),
        "scheduler": digest_of(task.scheduler.state_dict()) if _has_state(task.scheduler) else "",
    }
