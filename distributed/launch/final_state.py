"""How the trained state returns from the ranks to the caller: through the run's private folder, or by the
checkpoint that holds it already."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.checkpoint.collective_errors import agree
from distributed.interfaces.framework import Framework
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.resilience.preemption import INTERRUPT
from distributed.system.disk_room import free_bytes, no_room, readable

if TYPE_CHECKING:
    from distributed.training.loop import TrainingLoop

__all__ = ["FinalState", "check_room", "leave_state"]

logger = logging.getLogger("distributed")

_STATES = 3
"""Size of a state in sizes of its model: AdamW keeps two moments of each parameter."""


@dataclass(frozen=True)
class FinalState:
    """Where a run has left its state.

    Attributes:
        checkpoint: path of the checkpoint that holds it; None if the private folder does.
        problem: why it could not be written; empty if it was.
    """

    checkpoint: str | None = None
    problem: str = ""


def check_room(plan: RunPlan, task: Task, framework: Framework, folder: Path) -> None:
    """Compare the size of the state that will return with the free space in `folder`, before ranks start.

    Raises:
        UserError: the weights alone do not fit, and no checkpoint will have them.
    """
    if plan.config.return_weights == "none" or not framework.is_model(task.model):
        return
    size, free = framework.num_bytes(task.model), free_bytes(folder)
    if size is None or free >= _STATES * size:
        return
    if free < size and plan.config.checkpoint_dir is None:
        raise no_room("the trained weights, which return to this process through a file", folder, size)
    logger.warning(
        "the trained state returns to this process through %s, where %s are free, and with the moments of an"
        " optimizer it may have %s. Training continues. Set TMPDIR to a folder with more free space; or set"
        " checkpoint_dir, from which the state is taken if the last step is saved there; or, if this process"
        " needs no weights, return_weights=none",
        folder,
        readable(free),
        readable(_STATES * size),
    )


def leave_state(loop: TrainingLoop, plan: RunPlan, folder: Path) -> FinalState:
    """Leave the state of `loop` for the caller, in `folder` if possible. Collective.

    A checkpoint that holds it already is linked into the folder. If that is on another file system, the
    caller reads the checkpoint itself, unless the caller may not reach it, or its next run may move it.
    """
    # After Ctrl-C the caller still has a use for the weights.
    if plan.config.return_weights == "none" or loop.history.preempted not in (None, INTERRUPT.name):
        return FinalState()
    target, saved = folder / "state", loop.saver.find_saved()
    if saved is not None:
        first, source = loop.world.local_rank == 0, saved
        if all(agree(loop.backend, lambda: not first or _link(source, target))):
            return FinalState()
        if not plan.spec.remote and not plan.counts:
            return FinalState(saved)
    try:
        if plan.num_nodes == 1:
            loop.export_to(str(target))
        else:
            _export_on_every_node(loop, str(target))
    except OSError as error:
        return FinalState(saved) if saved else FinalState(problem=str(error))
    return FinalState()


def _link(checkpoint: str, target: Path) -> bool:
    """Link the files of a checkpoint into `target`, where they stay if the checkpoint is removed."""
    place = target / os.path.basename(checkpoint)
    try:
        shutil.copytree(checkpoint, place, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def _export_on_every_node(loop: TrainingLoop, folder: str) -> None:
    """Nodes may have no shared folder: the first rank of each writes the full state."""
    loop.backend.set_training(False)  # equal buffers: rank 0's
    loop.backend.release()  # unshard the state on every rank
    if loop.world.local_rank != 0:
        return
    loop.saver.export_to(folder, loop.backend.alone())
