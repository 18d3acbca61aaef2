"""The checkpoint directory of a run: its newest checkpoint, and the files of other runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from distributed.checkpoint.lease import Lease
from distributed.errors import UserError
from distributed.interfaces.launcher import RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.system.output import print_line

if TYPE_CHECKING:
    from distributed.checkpoint.checkpointer import PortableCheckpointer

RUN = "DISTRIBUTED_LEASE"
"""Environment variable of ranks: the run whose lease on ``checkpoint_dir`` their launcher holds."""


def newest_checkpoint(plan: RunPlan) -> str | None:
    """The checkpoint from which the next round resumes."""
    from distributed.checkpoint.checkpointer import PortableCheckpointer

    directory = plan.config.checkpoint_dir
    return None if directory is None else PortableCheckpointer(directory, keep_last=None).latest()


@contextmanager
def owned_directory(plan: RunPlan, command: RankCommand) -> Iterator[RankCommand]:
    """Own ``checkpoint_dir`` for all rounds of a run; yields the command of ranks that share the lease.

    Raises:
        UserError: as `claim_directory`.
    """
    lease = claim_directory(plan)
    try:
        yield lent(command, lease.run if lease else "")
    finally:
        if lease is not None:
            lease.release()


def lent(command: RankCommand, run: str) -> RankCommand:
    """`command` for ranks of the run whose lease the launcher holds."""
    return replace(command, env={**command.env, RUN: run})


def claim_directory(plan: RunPlan) -> Lease | None:
    """Before the first rank starts: acquire the lease on ``checkpoint_dir``, and move what other runs left
    there out of the way, so that the newest checkpoint there is always this run's own.

    Returns:
        The lease, which the caller releases at the end of the run; None without ``checkpoint_dir``.

    Raises:
        UserError: another run writes there, or something cannot be written or moved.
    """
    from distributed.checkpoint.checkpointer import PortableCheckpointer

    directory = plan.config.checkpoint_dir
    if directory is None:
        return None
    store = PortableCheckpointer(directory, keep_last=None)
    lease = Lease(store.files, store.directory, plan.config.checkpoint.lease_timeout)
    try:
        lease.acquire()
        _move_others(plan, store)
    except OSError as error:
        lease.release()
        raise not_writable(directory, error) from error
    except BaseException:
        lease.release()
        raise
    return lease


def not_writable(directory: str, error: OSError) -> UserError:
    """The error about a directory in which checkpoints cannot be written."""
    return UserError(
        f"checkpoints cannot be written there: {error}",
        field="checkpoint_dir",
        got=directory,
        allowed="a directory that every rank can write; on several nodes, one that all share",
        remedy="Choose another directory or fix its permissions",
    )


def _move_others(plan: RunPlan, store: PortableCheckpointer) -> None:
    from distributed.checkpoint.object_store import located
    from distributed.checkpoint.reader import read_manifest

    directory, source = plan.config.checkpoint_dir, plan.config.resume_from_checkpoint
    if source is True:
        return
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
