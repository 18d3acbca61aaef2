"""A running save: a thread writes while training continues.

Every rank's thread writes the rank's files. Rank 0's then waits until all ranks' indexes are there,
checks that the pieces make whole tensors, and commits. None of it needs the other ranks: they learn
the outcome in `PendingSave.finish`, where all of them call.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distributed.checkpoint.collective_errors import Ranks, complete, on_rank_zero
from distributed.checkpoint.file_names import rank_file, shard_file
from distributed.checkpoint.filesystem import FileLayer, unseal
from distributed.checkpoint.writer import write_rank
from distributed.interfaces.state import BackendState

__all__ = ["Commit", "PendingSave"]

_VISIBLE = 60.0
"""Seconds after which what every rank has written must be seen by rank 0."""

Facts = dict[str, dict[str, Any]]
Commit = Callable[[BackendState, Facts], None]
"""What makes a checkpoint of files: ``(what all ranks share, facts of every file)``."""


class PendingSave:
    """This rank's part of a save.

    Args:
        path: where the checkpoint will be.
        staging: the directory that is written.
        files: the operations that write.
    """

    def __init__(self, path: str, staging: str, rank: int, size: int, files: FileLayer) -> None:
        self.path, self.staging = path, staging
        self._rank, self._size, self._files = rank, size, files
        self._failure: Exception | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._deadline = float("inf")
        self._thread: threading.Thread | None = None

    def start(self, state: BackendState, rank_extra: dict[str, Any], commit: Commit) -> None:
        """Start to write `state`, which the caller no longer changes; `commit` is called on rank 0."""
        self._thread = threading.Thread(
            target=self._work, args=(state, rank_extra, commit), name="checkpoint", daemon=True
        )
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """There is nothing to write: `error` is this rank's part."""
        self._failure = error
        self._written.set()

    def has_news(self) -> bool:
        """Whether `finish` would return at once with an outcome that this rank alone knows."""
        if self._rank == 0:
            return self._thread is None or not self._thread.is_alive()
        return self._failure is not None

    def is_writing(self) -> bool:
        """Whether what was exported for it is still needed."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, ranks: Ranks) -> str:
        """Wait for the end; collective.

        Returns:
            The checkpoint's path.

        Raises:
            OSError, UserError, RuntimeError: a rank could not write, or rank 0 not commit; the
                same on every rank, which then has to `give_up`.
        """
        complete(ranks, self._wait_for_files)
        self._deadline = time.monotonic() + _VISIBLE
        on_rank_zero(ranks, self._wait_for_commit)
        return self.path

    def give_up(self) -> None:
        """End this rank's part, whatever it has come to, without the others."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join()

    def _wait_for_files(self) -> None:
        self._written.wait()
        self._raise_failure()

    def _wait_for_commit(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- in the thread -----------------------------------------------------------------

    def _work(self, state: BackendState, rank_extra: dict[str, Any], commit: Commit) -> None:
        try:
            write_rank(self._files, self.staging, self._rank, self._size, state, rank_extra)
            # The pieces are on the disk: only what all ranks share is still needed.
            state = replace(state, chunks=[])
            self._written.set()
            if self._rank == 0:
                facts = self._collect_facts()
                if facts is not None:
                    commit(state, facts)
        except Exception as error:  # noqa: BLE001 - raised again in finish, on every rank
            self._failure = error
        finally:
            self._written.set()

    def _collect_facts(self) -> Facts | None:
        """The file entries of every rank's index, once all exist; None after giving up."""
        missing, facts = {rank_file(rank): rank for rank in range(self._size)}, Facts()
        while True:
            for name in self._files.present(self.staging, list(missing)):
                path = os.path.join(self.staging, name)
                facts |= _facts_of(self._files, path, missing.pop(name), self._size)
            if not missing:
                return facts
            if time.monotonic() > self._deadline:
                raise FileNotFoundError(
                    f"what ranks {sorted(missing.values())} wrote is not seen by rank 0 after {_VISIBLE:g} s"
                )
            if self._given_up.wait(self._files.look):
                return None


def _facts_of(files: FileLayer, path: str, rank: int, size: int) -> Facts:
    raw = files.read(path)
    index = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return {shard_file(rank, size): unseal(raw)["shard"], rank_file(rank): index}
