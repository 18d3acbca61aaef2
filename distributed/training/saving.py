"""Saver: when to save, what counts as best, and what becomes of a save."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from distributed.checkpoint.async_save import PendingSave
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.codec import encode
from distributed.checkpoint.collective_errors import agree, on_rank_zero
from distributed.checkpoint.run_directory import not_writable
from distributed.checkpoint.same_state import holds_state
from distributed.config import DistributedConfig
from distributed.config.sections import is_object_store
from distributed.interfaces.backend import Backend
from distributed.interfaces.history import History
from distributed.interfaces.metric import larger_is_better, metric_name
from distributed.redaction import redact
from distributed.training.frozen_weights import FrozenWeights
from distributed.training.model_files import describe
from distributed.training.state import TrainState

logger = logging.getLogger("distributed")


class _Started(NamedTuple):
    """What a save was begun with.

    Attributes:
        progress: the cursor and counters that it saves.
        best: whether to mark it best.
        before: the best value before it.
    """

    progress: dict[str, Any]
    best: bool
    before: float | None

    @property
    def step(self) -> int:
        return int(self.progress["step"])


class Saver:
    """Saves checkpoints. Unless noted, methods are collective: every rank calls them at the same step, and
    all return or raise the same.

    Args:
        backend: the ranks, set up; prepared before the first save.
        state: what a checkpoint holds besides model and optimizer.
        history: its ``checkpoint`` and ``best_checkpoint`` are kept up to date.
        on_saved: called with path and step of each committed checkpoint.
        lease: the run whose lease on ``checkpoint_dir`` the launcher holds; empty if it holds none.

    Attributes:
        checkpointer: None without ``checkpoint_dir``, and before `prepare`.
        frozen: which parameters are left out.
        pending: the save in progress and what it saves, or None.
        failures: saves that failed in a row.
        reserved: whether `reserve` was called.
    """

    reserved = False

    def __init__(
        self,
        config: DistributedConfig,
        backend: Backend,
        state: TrainState,
        history: History,
        on_saved: Callable[[str, int], None] = lambda path, step: None,
        lease: str = "",
    ) -> None:
        self.config, self.backend, self.state, self.history = config, backend, state, history
        self.on_saved, self._lease = on_saved, lease
        self.checkpointer: PortableCheckpointer | None = None
        self.frozen = FrozenWeights(backend, state, config.checkpoint.trainable_only)
        self.pending: tuple[PendingSave, _Started] | None = None
        self.failures = 0
        self._files: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._origin_step = -1
        self._claimed = False

    def prepare(self) -> None:
        """Make the checkpointer, and check before training that saving can work.

        Raises:
            UserError: ``checkpoint_dir`` cannot be made or written, is not shared by all hosts, or
                another run writes there; or the scheduler's state contains a type that a checkpoint
                does not support.
        """
        if self.config.checkpoint_dir is None:
            return
        self.frozen.start()
        self._files = describe(self.backend.module)
        encode(self.state.schedule.state_dict(), "scheduler")
        section = self.config.checkpoint
        self.checkpointer = PortableCheckpointer(
            self.config.checkpoint_dir,
            keep_last=section.keep_last,
            keep_every=section.keep_every_n_steps,
            keep_buffers=section.asynchronous,
        )
        try:
            self.checkpointer.acquire(self.backend, section.lease_timeout, self._lease)
            self.checkpointer.prepare(self.backend)
        except OSError as error:
            raise not_writable(self.config.checkpoint_dir, error) from error

    # -- when ------------------------------------------------------------------------

    def save_if_due(self, *, epoch_end: bool, metrics: Mapping[str, float] | None = None) -> str | None:
        """Begin to save if the configuration asks for it. Call it once after each optimizer step, with
        `progress` already moved past it; for an epoch's last step, once, after validation.

        At the end of an epoch that has the deciding metric and beats all before, the checkpoint
        is saved whatever the frequency, and marked best.

        Args:
            epoch_end: the step ended an epoch.
            metrics: the epoch's metrics, equal on all ranks; None without.

        Returns:
            Where the checkpoint is, or under ``checkpoint.asynchronous`` will be; None when
            nothing is saved.

        Raises:
            OSError: saving failed ``checkpoint.max_failures`` times in a row.
            UserError: ``checkpoint.metric`` was not reported, or the state cannot be saved.
        """
        if self.checkpointer is None:
            return None
        due = self._is_due(epoch_end)
        if due or epoch_end:
            self.finish()  # One at a time; and whether it succeeded decides the best value so far.
        before = self.state.progress.best_metric
        best = bool(epoch_end and metrics and self._update_best(metrics))
        mark = best and self.config.checkpoint.keep_best
        return self._save(self.checkpointer, mark, before) if mark or due else None

    def reserve(self) -> None:
        """Allocate the memory of the first asynchronous save while training goes on. Call it once, on every
        rank, after a step: the optimizer has its state then."""
        self.reserved = True
        if self.checkpointer is not None:
            self.checkpointer.reserve(self.backend)

    def save_now(self) -> str | None:
        """Save at this step, whatever the frequency, and wait for it.

        Returns:
            The checkpoint's path; None without ``checkpoint_dir``, or when saving failed (logged).

        Raises:
            OSError: saving failed ``checkpoint.max_failures`` times in a row.
        """
        if self.checkpointer is None:
            return None
        self.finish()
        path = self._save(self.checkpointer, False, self.state.progress.best_metric)
        return self.finish() if self.pending else path

    def save_if_stopped(self) -> None:
        """Save at this step, whatever the frequency, if a signal or a callback has stopped the run here.

        Raises:
            OSError: a signal has preempted the run, and the step cannot be saved.
        """
        signal = self.history.preempted
        if self.history.stop_reason is None:
            return
        self.finish()
        if self._saved != asdict(self.state.progress) and self.save_now() is None and signal is not None:
            raise OSError(
                f"the run was preempted by {signal}, and step {self.state.progress.step} could not be saved"
                f" in {self.config.checkpoint_dir}; the newest checkpoint is {self.history.checkpoint}"
            )

    def _is_due(self, epoch_end: bool) -> bool:
        progress, every = self.state.progress, self.config.checkpoint.every_n_steps
        if every is not None and progress.step % every == 0:
            return True
        # The cursor stands at the start of the next epoch, or still at the end of this one.
        epochs = progress.epoch + (1 if progress.samples else 0)
        return epoch_end and epochs % self.config.checkpoint_frequency == 0

    def _update_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether this epoch beats all before; keeps its value if so. Rank 0 decides for all (C8)."""
        progress = self.state.progress
        name, before = metric_name(self.config.checkpoint.metric, metrics), progress.best_metric
        if name is None:
            return False
        value = float(self.backend.broadcast_object(float(metrics[name])))
        larger = larger_is_better(self.config.checkpoint.mode, name)
        best = not math.isnan(value) and (before is None or (value > before if larger else value < before))
        if best:
            progress.best_metric = value
        return best

    # -- one save --------------------------------------------------------------------

    def finish(self) -> str | None:
        """Wait until the save in progress is committed, if there is one.

        Returns:
            The checkpoint's path; None without a save in progress, or when it failed (logged).

        Raises:
            OSError: saving failed ``checkpoint.max_failures`` times in a row.
            UserError: the state contains a type that a checkpoint does not support.
        """
        if self.pending is None or self.checkpointer is None:
            return None
        (pending, started), self.pending = self.pending, None
        try:
            path = self.checkpointer.finish(self.backend, pending)
        except OSError as error:
            self._count_failure(started, error)
            return None
        self._commit(self.checkpointer, path, started)
        return path

    def has_finished(self) -> bool:
        """Whether this rank's part of the save in progress is done. Not collective."""
        return self.pending is not None and self.pending[0].has_news()

    def abandon(self) -> None:
        """Cancel the save in progress, because the run has failed. Not collective."""
        if self.pending is not None and self.checkpointer is not None:
            self.checkpointer.abandon(self.pending[0], self.backend.world.rank)
            self.pending = None

    def release(self) -> None:
        """Let other runs write into ``checkpoint_dir``: this one is over. Not collective."""
        if self.checkpointer is not None:
            self.checkpointer.release()

    def export_to(self, directory: str, backend: Backend | None = None) -> str:
        """Write the state as a portable checkpoint into `directory`, which is made when missing.

        Args:
            backend: the ranks that write, if these are not all: a single one that holds the whole state.

        Returns:
            The checkpoint's path, as `Resumer.load` and `PortableReader` take it.

        Raises:
            OSError: it cannot be written.
        """
        ranks = backend or self.backend
        store = PortableCheckpointer(directory, keep_last=None)
        store.prepare(ranks)
        return store.save(ranks, *self._contents(ranks, best=False, complete=True))

    def find_saved(self) -> str | None:
        """The checkpoint that holds exactly what `export_to` would write now, on a disk; None without one."""
        path, checkpointer = self.history.checkpoint, self.checkpointer
        if checkpointer is None or path != checkpointer.path_of(self.state.progress.step):
            return None
        if is_object_store(checkpointer.directory):
            return None
        contents, world = self._contents(self.backend, best=False, complete=True), self.backend.world
        state = self.backend.export_state()
        same = agree(self.backend, lambda: holds_state(path, world.rank, world.size, state, *contents))
        return path if all(same) else None

    def _save(self, checkpointer: PortableCheckpointer, best: bool, before: float | None) -> str | None:
        started = _Started(asdict(self.state.progress), best, before)
        try:
            self._claim(checkpointer)
            begun = checkpointer.begin(self.backend, *self._contents(self.backend, best))
        except OSError as error:
            self._count_failure(started, error)
            return None
        if isinstance(begun, str):
            self._commit(checkpointer, begun, started)
            return begun
        self.pending = (begun, started)
        return begun.path if self.config.checkpoint.asynchronous else self.finish()

    def _contents(
        self, ranks: Backend, best: bool, complete: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all ranks and what this one add to model and optimizer.

        Args:
            complete: leave no parameter out.
        """
        self.state.name_run(ranks)
        saved = self.state.capture()
        if self.state.shares_stream and ranks.world.rank != 0:
            saved.rank["stream"] = None
        omitted = {} if complete else self.frozen.omitted()
        if self.state.frozen_at_start:
            ranks.leave_out(omitted)
        # Nothing reads it but commands that print it: a resumed run has a configuration of its own.
        config = redact(self.config.model_dump(mode="json"))
        added = {"config": config, "best": best, "omitted": omitted, "model_files": self._files}
        return {**saved.common, **added}, saved.rank

    def _count_failure(self, started: _Started, error: OSError) -> None:
        if started.best:
            self.state.progress.best_metric = started.before
        self.failures += 1
        message = "checkpoint of step %d not saved (failure %d in a row): %s"
        log_on_rank_zero(self.backend, logging.WARNING, message, started.step, self.failures, error)
        if self.failures >= self.config.checkpoint.max_failures:
            raise error

    def _commit(self, checkpointer: PortableCheckpointer, path: str, started: _Started) -> None:
        self.failures, self._saved = 0, started.progress
        self.history.checkpoint = path
        if started.best:
            self._mark_best(checkpointer, path)
        self.on_saved(path, started.step)

    def _mark_best(self, checkpointer: PortableCheckpointer, path: str) -> None:
        try:
            on_rank_zero(self.backend, lambda: checkpointer.mark_best(path))
        except OSError as error:
            message = "%s is saved but cannot be marked best: %s"
            log_on_rank_zero(self.backend, logging.WARNING, message, path, error)
        else:
            self.history.best_checkpoint = path

    # -- whose checkpoints are in the directory ----------------------------------------

    def continue_from(self, path: str, step: int, best: bool) -> None:
        """The run continues from the checkpoint `path` of optimizer step `step`.

        Args:
            best: it was saved as the best of its run.
        """
        self._origin_step, self._claimed, self._saved = step, False, asdict(self.state.progress)
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        if os.path.dirname(path) == checkpointer.directory:
            self.history.checkpoint = path
            # A kill between saving and marking leaves the mark to the resumed run.
            if best and self.config.checkpoint.keep_best:
                self._mark_best(checkpointer, path)
        self.history.best_checkpoint = on_rank_zero(self.backend, lambda: self._own_best(checkpointer))

    def continue_fit(self, step: int, best_checkpoint: str | None) -> None:
        """The run continues, in this process, from an earlier `fit` that ended at `step`."""
        self._origin_step = step
        self.history.best_checkpoint = best_checkpoint

    def _own_best(self, checkpointer: PortableCheckpointer) -> str | None:
        best = checkpointer.best()
        own = best is not None and PortableCheckpointer.lineage(best) == self.state.lineage
        return best if own else None

    def _claim(self, checkpointer: PortableCheckpointer) -> None:
        """Before the first save: move the checkpoints of other runs out of the way."""
        if self._claimed:
            return
        lineage, step = self.state.name_run(self.backend), self._origin_step
        moved = on_rank_zero(self.backend, lambda: checkpointer.set_aside(lineage, step))
        self._claimed = True
        if moved:
            message = "checkpoints in %s that this run does not continue were moved to %s"
            log_on_rank_zero(self.backend, logging.WARNING, message, checkpointer.directory, moved)


def log_on_rank_zero(backend: Backend, level: int, message: str, *values: Any) -> None:
    """Log once for all ranks."""
    if backend.world.rank == 0:
        logger.log(level, message, *values)
