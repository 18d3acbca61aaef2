"""When to save, and what counts as best."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distributed.checkpoint.async_save import PendingSave
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.codec import encode
from distributed.checkpoint.collective_errors import on_rank_zero
from distributed.checkpoint.random_state import capture_rng
from distributed.errors import UserError
from distributed.interfaces.metric import larger_is_better, metric_name
from distributed.training.resuming import ResumingMixin

__all__ = ["CheckpointingMixin"]

logger = logging.getLogger("distributed")


class CheckpointingMixin(ResumingMixin):
    """Saving, and loading, for the training loop's per-rank class. All methods are collective: every
    rank calls them alike, and all return or raise the same.
    """

    _failures = 0
    _pending: tuple[PendingSave, int, bool, float | None] | None = None
    """(save, its step, whether it is to be marked best, the best figure before it)."""

    def setup_checkpointing(self) -> None:
        """Make the checkpointer, and find out before training whether saving can work.

        Raises:
            UserError: ``checkpoint_dir`` cannot be made or written, or is not shared by all
                hosts; or the scheduler's state holds what a checkpoint cannot.
        """
        if self.config.checkpoint_dir is None:
            return
        encode(self._scheduler_state(), "scheduler")
        section = self.config.checkpoint
        self.checkpointer = PortableCheckpointer(
            self.config.checkpoint_dir,
            keep_last=section.keep_last,
            keep_every=section.keep_every_n_steps,
            keep_buffers=section.asynchronous,
        )
        try:
            self.checkpointer.prepare(self.backend)
        except OSError as error:
            raise UserError(
                f"checkpoints cannot be written there: {error}",
                field="checkpoint_dir",
                got=self.config.checkpoint_dir,
                allowed="a directory that every rank can write; on several nodes, one that all share",
                remedy="Choose another directory, or mend its permissions",
            ) from error

    def save_if_due(self, *, epoch_end: bool, metrics: Mapping[str, float] | None = None) -> str | None:
        """Begin to save when the configuration says so. Call it once after each optimizer step, with
        `progress` already moved past it; for an epoch's last step, once, after validation.

        At the end of an epoch that has the deciding metric and beats all before, the checkpoint
        is saved whatever the frequency, and marked best.

        Args:
            epoch_end: the step ended an epoch.
            metrics: the epoch's figures, equal on all ranks; None without.

        Returns:
            Where the checkpoint is, or under ``checkpoint.asynchronous`` will be; None when
            nothing is saved.

        Raises:
            OSError: saving failed ``checkpoint.max_failures`` times in a row.
            UserError: ``checkpoint.metric`` names no figure, or the state cannot be saved.
        """
        if self.checkpointer is None:
            return None
        due = self._is_due(epoch_end)
        if due or epoch_end:
            self.finish_saving()  # One at a time; and what it made of the best figure counts.
        before = self.progress.best_metric
        best = bool(epoch_end and metrics and self._decide_best(metrics))
        mark = best and self.config.checkpoint.keep_best
        return self._save(self.checkpointer, mark, before) if mark or due else None

    def save_now(self) -> str | None:
        """Save at this step, whatever the frequency, and wait for it.

        Returns:
            The checkpoint's path; None without ``checkpoint_dir``, or when saving failed (logged).

        Raises:
            OSError: saving failed ``checkpoint.max_failures`` times in a row.
        """
        if self.checkpointer is None:
            return None
        self.finish_saving()
        path = self._save(self.checkpointer, False, self.progress.best_metric)
        return self.finish_saving() if self._pending else path

    def save_when_preempted(self) -> None:
        """When a signal asked the run to go: save at this step, whatever the frequency.

        Raises:
            OSError: it cannot be saved.
        """
        signal = self.history.preempted
        if signal is not None and self.save_now() is None:
            raise OSError(
                f"{signal} asked the run to go and step {self.progress.step} could not be saved in"
                f" {self.config.checkpoint_dir}; an earlier step is in {self.history.checkpoint}"
            )

    def finish_saving(self) -> str | None:
        """Wait until the save under way is committed, if there is one.

        Returns:
            The checkpoint's path; None when nothing was under way, or it failed (logged).

        Raises:
            OSError: saving failed ``checkpoint.max_failures`` times in a row.
            UserError: the state holds what a checkpoint cannot.
        """
        if self._pending is None or self.checkpointer is None:
            return None
        (pending, step, best, before), self._pending = self._pending, None
        try:
            path = self.checkpointer.finish(self.backend, pending)
        except OSError as error:
            if best:
                self.progress.best_metric = before
            self._count_failure(step, error)
            return None
        self._note_saved(self.checkpointer, path, step, best)
        return path

    def news_of_saving(self) -> float:
        """1.0 when this rank alone knows how the save under way ended, else 0.0. Not collective."""
        return 1.0 if self._pending is not None and self._pending[0].has_news() else 0.0

    def abandon_saving(self) -> None:
        """End the save under way without the other ranks: the run has failed. Not collective."""
        if self._pending is not None and self.checkpointer is not None:
            self.checkpointer.abandon(self._pending[0], self.world.rank)
            self._pending = None

    def export_to(self, directory: str) -> str:
        """Write the state as a portable checkpoint into `directory`, which is made when missing.

        Returns:
            The checkpoint's path: what `load_state` and `PortableReader` take.

        Raises:
            OSError: it cannot be written.
        """
        store = PortableCheckpointer(directory, keep_last=None)
        store.prepare(self.backend)
        return store.save(self.backend, self._extra(best=False), self._rank_extra())

    def _save(self, checkpointer: PortableCheckpointer, best: bool, before: float | None) -> str | None:
        step = self.progress.step
        try:
            self._claim(checkpointer)
            begun = checkpointer.begin(self.backend, self._extra(best), self._rank_extra())
        except OSError as error:
            if best:
                self.progress.best_metric = before
            self._count_failure(step, error)
            return None
        if isinstance(begun, str):
            self._note_saved(checkpointer, begun, step, best)
            return begun
        self._pending = (begun, step, best, before)
        return begun.path if self.config.checkpoint.asynchronous else self.finish_saving()

    def _count_failure(self, step: int, error: OSError) -> None:
        self._failures += 1
        self._say(
            logging.WARNING,
            "checkpoint of step %d not saved (failure %d in a row): %s",
            step,
            self._failures,
            error,
        )
        if self._failures >= self.config.checkpoint.max_failures:
            raise error

    def _note_saved(self, checkpointer: PortableCheckpointer, path: str, step: int, best: bool) -> None:
        self._failures = 0
        self.history.checkpoint = path
        if best:
            self._mark(checkpointer, path)
        self._notify("on_checkpoint", self, path)
        self.track_checkpoint(path, step)

    def _claim(self, checkpointer: PortableCheckpointer) -> None:
        """Before the first save: what other runs left in the directory moves out of the way."""
        if self._claimed:
            return
        lineage, step = self._own_lineage(), self._origin_step
        moved = on_rank_zero(self.backend, lambda: checkpointer.set_aside(lineage, step))
        self._claimed = True
        if moved:
            self._say(
                logging.WARNING,
                "checkpoints in %s that this run does not go on from were moved to %s",
                checkpointer.directory,
                moved,
            )

    def _own_lineage(self) -> str:
        if self._lineage is None:
            self._lineage = self.backend.broadcast_object(secrets.token_hex(16))
        return str(self._lineage)

    def _extra(self, best: bool) -> dict[str, Any]:
        return {
            "progress": asdict(self.progress),
            "scheduler": self._scheduler_state(),
            "config": self.config.model_dump(mode="json"),
            "best": best,
            "lineage": self._own_lineage(),
            "callbacks": self.callback_states(),
        }

    def _rank_extra(self) -> dict[str, Any]:
        return {"rng": capture_rng(), "records": self.record_state(), "stream": self._stream_state()}

    def _scheduler_state(self) -> Any:
        return None if self.scheduler is None else self.scheduler.state_dict()

    def _is_due(self, epoch_end: bool) -> bool:
        every = self.config.checkpoint.every_n_steps
        if every is not None and self.progress.step % every == 0:
            return True
        # The cursor stands at the start of the next epoch, or still at the end of this one.
        epochs = self.progress.epoch + (1 if self.progress.samples else 0)
        return epoch_end and epochs % self.config.checkpoint_frequency == 0

    def _decide_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether this epoch beats all before; notes its value if so. Rank 0 decides for all (C8)."""
        name, before = metric_name(self.config.checkpoint.metric, metrics), self.progress.best_metric
        if name is None:
            return False
        value = float(self.backend.broadcast_object(float(metrics[name])))
        larger = larger_is_better(self.config.checkpoint.mode, name)
        best = not math.isnan(value) and (before is None or (value > before if larger else value < before))
        if best:
            self.progress.best_metric = value
        return best
