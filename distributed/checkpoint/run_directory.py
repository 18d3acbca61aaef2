"""The checkpoint directory of a run: its newest checkpoint, and the files of other runs."""

from __future__ import annotations

import os
import sys

from distributed.errors import UserError
from distributed.interfaces.plan import RunPlan
from distributed.system.output import print_line


def newest_checkpoint(plan: RunPlan) -> str | None:
    """The checkpoint from which the next round resumes."""
    from distributed.checkpoint.checkpointer import PortableCheckpointer

    directory = plan.config.checkpoint_dir
    return None if directory is None else PortableCheckpointer(directory, keep_last=None).latest()


def claim_directory(plan: RunPlan) -> None:
    """Before the first rank starts: move what other runs left in ``checkpoint_dir`` out of the way, so
    that the newest checkpoint there is always this run's own.

    Raises:
        UserError: something cannot be moved.
    """
    from distributed.checkpoint.checkpointer import PortableCheckpointer
    from distributed.checkpoint.object_store import located
    from distributed.checkpoint.reader import read_manifest

    directory, source = plan.config.checkpoint_dir, plan.config.resume_from_checkpoint
    if directory is None or source is True:
        return
    store = PortableCheckpointer(directory, keep_last=None)
    lineage, step = "", -1
    if isinstance(source, str):
        _, path = located(source)
        if path == store.directory:
            return
        if os.path.dirname(path) == store.directory:
            lineage, step = str(store.lineage(path)), int(read_manifest(path)["step"])
    try:
        moved = store.set_aside(lineage, step)
    except OSError as error:
        raise UserError(
            f"cannot move the checkpoints of another run into a subdirectory: {error}",
            field="checkpoint_dir",
            got=directory,
            remedy="Choose another directory",
        ) from error
    if moved:
        text = f"checkpoints in {directory} that belong to another run were moved to {moved}"
        print_line(text, sys.stdout)
