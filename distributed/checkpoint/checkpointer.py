"""Commits checkpoints under one directory: all of one, or nothing of it.

Every rank writes its own files into a hidden sibling. Rank 0 checks that the pieces make whole
tensors, writes the manifest and renames the sibling: from then on the checkpoint exists.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

from distributed.checkpoint.async_save import PendingSave
from distributed.checkpoint.chunk_index import ChunkEntry
from distributed.checkpoint.codec import encode
from distributed.checkpoint.collective_errors import Ranks, complete, on_rank_zero
from distributed.checkpoint.commit_protocol import Commits, commits_of
from distributed.checkpoint.file_names import (
    BEST,
    FOREIGN,
    FORMAT,
    MERGED,
    STEP,
    VERSION,
    rank_file,
    step_name,
)
from distributed.checkpoint.filesystem import FileLayer, seal, unseal
from distributed.checkpoint.lease import Lease
from distributed.checkpoint.object_store import located
from distributed.checkpoint.reader import check_files, read_index, read_manifest, verify
from distributed.checkpoint.staging_buffers import HostBuffers
from distributed.checkpoint.writer import manifest_of, merge_indexes, merge_scalars
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.state import BackendState
from distributed.system.strict_json import shown

logger = logging.getLogger("distributed")


class PortableCheckpointer:
    """Portable checkpoints of one run under `directory`.

    Args:
        directory: where ``step_NNNNNNNN`` directories go, a path or a URL; on several nodes, one
            that all share.
        keep_last: how many of the newest to keep, the best one besides; None keeps all.
        keep_every: keep also steps that this number divides.
        files: what writes; None takes what fits `directory`.
        keep_buffers: keep the host memory into which a save copies the state for the next one,
            which then takes a fraction of the time.

    Attributes:
        lease: on rank 0, what allows to write there; None does not check.

    Raises:
        UserError: `keep_last` is below 1, or nothing opens the URL.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep_last: int | None,
        keep_every: int | None = None,
        files: FileLayer | None = None,
        keep_buffers: bool = False,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise UserError(
                "the newest checkpoint must be kept",
                field="checkpoint.keep_last",
                got=keep_last,
                allowed="1 or more, or nothing to keep all",
            )
        fitting, self.directory = located(directory)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.files = files or fitting
        self._best_file = os.path.join(self.directory, BEST)
        self._swept = False
        self.lease: Lease | None = None
        self._buffers = HostBuffers() if keep_buffers else None
        self._last: PendingSave | None = None

    def save(self, backend: Backend, extra: dict[str, Any], rank_extra: dict[str, Any]) -> str:
        """Write and commit one checkpoint of step ``extra["progress"]["step"]``; every rank calls.

        A step that is committed and whole is left alone, and saving it again returns its path, unless the
        progress differs: the last step of an epoch is that of two states, before and after its end. The
        later one takes the place of the other at once, so that there is a checkpoint at any moment.

        Raises:
            OSError: a rank could not write; the same error on every rank. Committed ones stay.
            UserError: the state holds what the format cannot; likewise.
        """
        pending = self.begin(backend, extra, rank_extra)
        return pending if isinstance(pending, str) else self.finish(backend, pending)

    def begin(self, backend: Backend, extra: dict[str, Any], rank_extra: dict[str, Any]) -> PendingSave | str:
        """Copy this rank's state and start to write it, as `save` would; every rank calls.

        Returns:
            What `finish` takes; the path when the step is committed and whole already.

        Raises:
            OSError: rank 0 cannot make a directory; the same error on every rank.
        """
        step = int(extra["progress"]["step"])
        final, size = self.path_of(step), backend.world.size
        staged = on_rank_zero(backend, lambda: self._stage(final, extra))
        if staged is None:
            return final
        staging, replaces = staged
        pending = PendingSave(final, staging, backend.world.rank, size, self.files)
        shared = deepcopy(extra)  # The caller's may change while the thread writes.

        def commit(state: BackendState, facts: dict[str, dict[str, Any]]) -> None:
            self._commit(staging, final, step, state, shared, facts, size, replaces)
            self._collect()

        try:
            with self._lent_buffers():
                state = backend.export_state()
        except Exception as error:  # noqa: BLE001 - raised again in finish, on every rank
            pending.fail(error)
        else:
            pending.start(state, rank_extra, commit)
            self._last = pending
        return pending

    def reserve(self, backend: Backend) -> None:
        """Allocate the memory of the first asynchronous save in a thread; every rank calls, once."""
        if self._buffers is not None:
            self._buffers.reserve(backend.export_state)

    def _lent_buffers(self) -> AbstractContextManager[None]:
        writing = self._last is not None and self._last.is_writing()
        return nullcontext() if self._buffers is None or writing else self._buffers.lent()

    def finish(self, backend: Ranks, pending: PendingSave) -> str:
        """Wait until `pending` is committed, and return its path; every rank calls.

        Raises:
            OSError, UserError, RuntimeError: as `save`.
        """
        try:
            return pending.finish(backend)
        except BaseException:
            self.abandon(pending, backend.world.rank)
            raise

    def abandon(self, pending: PendingSave, rank: int) -> None:
        """End a save that may not be finished, without the other ranks."""
        pending.give_up()
        if rank == 0:
            self._commits.discard(pending.staging)

    def acquire(self, ranks: Ranks, timeout: float, run: str = "") -> None:
        """Acquire the lease on the directory, before anything there is moved or written; every rank calls.

        Args:
            timeout: seconds without a heartbeat after which another host may take it over.
            run: the run whose lease another process holds for these ranks; empty if none does.

        Raises:
            UserError: another run holds it.
            OSError: the directory cannot be made or written; the same error on every rank.
        """
        lease = Lease(self.files, self.directory, timeout, run)
        # A collective at every attempt: ranks that wait are seen to make progress.
        while not on_rank_zero(ranks, lease.attempt):
            pass
        self.lease = lease if ranks.world.rank == 0 else None

    def release(self) -> None:
        """Give the lease back, if this process holds it. Not collective."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def prepare(self, ranks: Ranks) -> None:
        """Make the directory, clear leftovers, and try from every rank that it can be written;
        every rank calls.

        Raises:
            OSError: it cannot; the same error on every rank.
        """
        staging = on_rank_zero(ranks, self._probe)
        path = os.path.join(staging, rank_file(ranks.world.rank))
        try:
            complete(ranks, lambda: self.files.write_file(path, b""))
            on_rank_zero(ranks, lambda: self._check_shared(staging, ranks.world.size))
            if ranks.world.rank == 0 and self.files.unsynced:
                logger.warning(
                    "the file system of %s refuses fsync: training continues, and a loss of power or of the"
                    " host may damage the newest checkpoints",
                    self.directory,
                )
        finally:
            if ranks.world.rank == 0:
                self._commits.discard(staging)

    @property
    def _commits(self) -> Commits:
        return commits_of(self.files, self.directory)

    def path_of(self, step: int) -> str:
        """Where the checkpoint of `step` is or would be."""
        return os.path.join(self.directory, step_name(step))

    def steps(self) -> list[int]:
        """Steps that were committed, newest first, damaged ones included."""
        return sorted((int(name.removeprefix("step_")) for name in self._commits.names()), reverse=True)

    def candidates(self) -> Iterator[str]:
        """Paths of the complete checkpoints, newest first. Damaged ones are passed over, with a
        warning that names the file."""
        for step in self.steps():
            path = self.path_of(step)
            try:
                read_manifest(path)
            except UserError as error:
                logger.warning("passing over %s: %s", path, error)
            else:
                yield path

    def latest(self) -> str | None:
        """Path of the newest complete checkpoint whose manifest is valid, None without."""
        return next(self.candidates(), None)

    def mark_best(self, path: str) -> None:
        """Name the checkpoint at `path` the best: it is kept until another one is.

        Raises:
            OSError: the mark cannot be written; the old one stays.
        """
        self._check_lease()
        name = os.path.basename(os.path.normpath(path))
        mark = seal({"format": FORMAT, "version": VERSION, "best": name})
        self.files.publish(self._best_file, mark, self._commits.hidden("tmp", "best"))
        self.files.fsync_directory(self.directory)

    def best(self) -> str | None:
        """Path of the checkpoint marked best, None when there is none or it is damaged."""
        path = self._marked()
        try:
            if path is not None:
                read_manifest(path)
        except UserError as error:
            logger.warning("the best checkpoint is not usable: %s", error)
            return None
        return path

    def sweep(self) -> None:
        """Remove what an interrupted save left behind. Only by the holder of the lease."""
        self._swept = True
        for path in self._commits.leftovers():
            self._commits.discard(path)

    def set_aside(self, lineage: str, last_step: int) -> str | None:
        """Move checkpoints that are not this run's past out of its way, into a sub-directory.

        Otherwise a run that starts over in a used directory, or resumes from an older step, would
        resume from states of another run, or delete its own for them.

        Args:
            lineage: ``extra["lineage"]`` of this run's checkpoints.
            last_step: step from which this run resumed; -1 when it started over.

        Returns:
            The sub-directory; None when nothing was moved.

        Raises:
            OSError: something cannot be moved.
        """
        self._check_lease()
        foreign = [
            path
            for step, path in ((step, self.path_of(step)) for step in self.steps())
            if step > last_step or self.lineage(path) != lineage
        ]
        if not foreign:
            return None
        aside = os.path.join(self.directory, f"superseded_{secrets.token_hex(4)}")
        self.files.make_directory(aside)
        best = self._marked()
        for path in foreign:
            self._commits.move(path, aside)
            if path == best:
                self._commits.move_file(self._best_file, aside)
        self.files.fsync_directory(self.directory)
        return aside

    @staticmethod
    def lineage(path: str) -> str | None:
        """``extra["lineage"]`` of the checkpoint at `path`; None when it is damaged or has none."""
        try:
            lineage = read_manifest(path)["extra"].get("lineage")
        except UserError:
            return None
        return lineage if isinstance(lineage, str) else None

    def prune(self, keep_last: int, keep_every: int | None = None, dry_run: bool = False) -> list[str]:
        """Remove good checkpoints but for the newest `keep_last`, the best, and those of steps
        that `keep_every` divides. What cannot be read stays: another version may be able to.
        Only by the holder of the lease.

        Returns:
            The paths removed, newest first; with `dry_run`, those that would be.
        """
        kept = {*self._regular(keep_every), self._marked()}
        doomed = [path for path in list(self.candidates())[keep_last:] if path not in kept]
        if not dry_run:
            for path in doomed:
                self._commits.drop(path)
        return doomed

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _probe(self) -> str:
        self.files.make_directories(self.directory)
        self.sweep()
        staging = self._commits.hidden("tmp", "probe")
        self.files.make_directory(staging)
        self.files.fsync_directory(self.directory)
        foreign = [name for name in self.files.names(self.directory) if FOREIGN.fullmatch(name)]
        if foreign:
            logger.warning("passing over what is not named as a checkpoint: %s", ", ".join(sorted(foreign)))
        return staging

    def _check_shared(self, staging: str, size: int) -> None:
        names = [rank_file(rank) for rank in range(size)]
        absent = set(names) - set(self.files.present(staging, names))
        if absent:
            raise FileNotFoundError(f"rank 0 does not see there what {len(absent)} of {size} ranks wrote")

    def _stage(self, final: str, extra: Mapping[str, Any]) -> tuple[str, bool] | None:
        """A new place to write into, and whether it replaces another state of that step; None when `final`
        is committed, good, and of this run."""
        self._check_lease()
        if not self._swept:
            self.sweep()
        replaces = False
        if self._commits.exists(final) and not verify(final):
            if self.lineage(final) != extra.get("lineage"):
                raise FileExistsError(f"another run has committed {final}")
            if _same(read_manifest(final)["extra"].get("progress", {}), extra["progress"]):
                return None
            replaces = True
        # Who took the directory away in the middle of a run may have given it back, empty.
        self.files.make_directories(self.directory)
        staging = self._commits.staging(final, replaces)
        self.files.make_directory(staging)
        return staging, replaces

    def _commit(
        self,
        staging: str,
        final: str,
        step: int,
        state: BackendState,
        extra: dict[str, Any],
        facts: dict[str, dict[str, Any]],
        size: int,
        replaces: bool,
    ) -> None:
        names = map(rank_file, range(size))
        indexes = [
            read_index(self.files, os.path.join(staging, name), facts[name]["sha256"]) for name in names
        ]
        entries = [ChunkEntry.from_json(data) for index in indexes for data in index["chunks"]]
        merge_scalars(state, indexes)
        merged = merge_indexes(indexes, facts)
        if merged is not None:
            self.files.write_file(os.path.join(staging, MERGED), merged)
            facts |= {MERGED: {"size": len(merged), "sha256": hashlib.sha256(merged).hexdigest()}}
        folder = self._commits.folder(staging)
        manifest = seal(manifest_of(step, state, extra, facts, entries, size, folder))
        # What another host wrote must be here too: this sees a directory that is not shared.
        check_files(self.files, staging, facts)
        self._check_lease()
        if replaces:
            self._commits.replace(staging, final, manifest)
            return
        self._commits.commit(staging, final, manifest)

    def _collect(self) -> None:
        """Remove what is older than the last `keep_last`. The save has succeeded: never raises."""
        if self.keep_last is None:
            return
        # Damaged ones do not count, or they would push out the good.
        kept = [path for path, _ in zip(self.candidates(), range(self.keep_last), strict=False)]
        best = self._marked()
        if len(kept) < self.keep_last or (best is None and self.files.exists(self._best_file)):
            return
        stays = {best, *self._regular(self.keep_every)}
        paths = [self.path_of(step) for step in self.steps()]
        for path in paths[paths.index(kept[-1]) + 1 :]:
            if path not in stays:
                self._commits.drop(path)

    def _regular(self, every: int | None) -> list[str]:
        return [self.path_of(step) for step in self.steps() if every and step % every == 0]

    def _marked(self) -> str | None:
        try:
            name = unseal(self.files.read(self._best_file)).get("best")
            if not isinstance(name, str) or not STEP.fullmatch(name):
                raise ValueError(f"{shown(name)} is not the name of a checkpoint")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            logger.warning("passing over %s: %s", self._best_file, why)
            return None
        return os.path.join(self.directory, name) if STEP.fullmatch(name) else None


def _same(saved: Mapping[str, Any], progress: Mapping[str, Any]) -> bool:
    """Whether a manifest's progress is `progress`. Checkpoints of earlier versions have fewer entries."""
    ours = encode(dict(progress), "progress")
    return all(repr(saved.get(name)) == repr(ours.get(name)) for name in saved.keys() | ours.keys())
