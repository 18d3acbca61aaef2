"""When to save, what counts as best, and how a run goes on from a saved state."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from distributed.checkpoint.agreement import agree, on_rank_zero
from distributed.checkpoint.best import larger_is_better, metric_name
from distributed.checkpoint.codec import encode
from distributed.checkpoint.layout import PortableCheckpointer
from distributed.checkpoint.names import MANIFEST
from distributed.checkpoint.objects import located
from distributed.checkpoint.pending import PendingSave
from distributed.checkpoint.reader import PortableReader, verify
from distributed.checkpoint.rng import capture_rng, restore_rng
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend import Backend, World
from distributed.interfaces.history import History
from distributed.interfaces.task import Progress

__all__ = ["CheckpointingMixin"]

logger = logging.getLogger("distributed")


class CheckpointingMixin:
    """Checkpointing for the training loop's per-rank class. All methods are collective: every
    rank calls them alike, and all return or raise the same.

    Attributes:
        config: the run's configuration.
        backend: the ranks, set up and prepared.
        progress: cursor and counters; overwritten in place by `resume` and `load_state`.
        history: its ``checkpoint`` and ``best_checkpoint`` are kept up to date.
        scheduler: an object with `state_dict` and `load_state_dict`, or None.
        world: this rank's place.
        checkpointer: None without ``checkpoint_dir``.
    """

    config: DistributedConfig
    backend: Backend
    progress: Progress
    history: History
    scheduler: Any
    world: World
    checkpointer: PortableCheckpointer | None = None

    _failures = 0
    _pending: tuple[PendingSave, int, bool, float | None] | None = None
    """(save, its step, whether it is to be marked best, the best figure before it)."""
    _lineage: str | None = None
    _origin_step = -1
    _claimed = False

    def _notify(self, event: str, *args: Any) -> None:
        """Tell the callbacks; without any, nobody."""

    def callback_states(self) -> list[list[Any]]:
        """``[class, state]`` of each callback that has any."""
        return []

    def restore_callbacks(self, states: list[list[Any]]) -> None:
        """The inverse of `callback_states`."""

    def record_state(self) -> dict[str, Any]:
        """This rank's records of the epoch under way."""
        return {}

    def restore_records(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the records of all ranks that saved."""

    def warm_up(self, step: int) -> None:
        """Before the state after `step` optimizer steps is loaded. Collective."""

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

    def resume(self) -> bool:
        """Go on from where ``resume_from_checkpoint`` says; False when it says nothing, or when
        it is True and there is no good checkpoint yet.

        Raises:
            UserError: the path given is no checkpoint or a damaged one, or is of another model.
        """
        source: bool | str = self.config.resume_from_checkpoint
        if self.config.is_elastic and self.checkpointer is not None:
            # Before the first round other runs' checkpoints were moved out of the directory.
            own = self.checkpointer
            source = source if on_rank_zero(self.backend, own.latest) is None else True
        if source is False or (source is True and self.checkpointer is None):
            return False
        files, directory = located(str(self.config.checkpoint_dir if source is True else source))
        explicit = None if source is True else directory
        if explicit and on_rank_zero(self.backend, lambda: files.exists(os.path.join(explicit, MANIFEST))):
            self.load_state(explicit)
            return True
        store = PortableCheckpointer(directory, keep_last=None)
        for path in on_rank_zero(self.backend, lambda: list(store.candidates())):
            problems = self._problems(path)
            if not problems:
                self._restore(path)
                return True
            self._say(logging.WARNING, "passing over %s: %s", path, problems[0])
        if explicit:
            raise UserError(
                "no good checkpoint there",
                field="resume_from_checkpoint",
                got=explicit,
                allowed="a checkpoint (step_NNNNNNNN) or a directory of checkpoints",
            )
        self._say(logging.INFO, "no checkpoint in %s yet: starting from the beginning", directory)
        return False

    def load_state(self, path: str) -> None:
        """Load the checkpoint at `path`: model, optimizer, scaler, scheduler, progress, and this
        rank's random number generators when as many ranks saved it.

        Raises:
            UserError: it is missing, damaged, or of another model or optimizer.
        """
        problems = self._problems(path)
        if problems:
            raise UserError(
                f"the checkpoint cannot be used: {problems[0]}", got=path, remedy="Load another one"
            )
        self._restore(path)

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
        self._note_saved(self.checkpointer, path, best)
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
            self._note_saved(checkpointer, begun, best)
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

    def _note_saved(self, checkpointer: PortableCheckpointer, path: str, best: bool) -> None:
        self._failures = 0
        self.history.checkpoint = path
        if best:
            self._mark(checkpointer, path)
        self._notify("on_checkpoint", self, path)

    def _mark(self, checkpointer: PortableCheckpointer, path: str) -> None:
        try:
            on_rank_zero(self.backend, lambda: checkpointer.mark_best(path))
        except OSError as error:
            self._say(logging.WARNING, "%s is saved but cannot be marked best: %s", path, error)
        else:
            self.history.best_checkpoint = path

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

    def _stream_state(self) -> Any:
        """What the data needs besides the cursor; without a feed, nothing."""

    def _restore_stream(self, reader: PortableReader) -> None:
        """Put the data back to its place; without a feed, nothing."""

    def _scheduler_state(self) -> Any:
        return None if self.scheduler is None else self.scheduler.state_dict()

    def _problems(self, path: str) -> list[str]:
        """What is wrong with a checkpoint; the ranks divide the reading among them."""
        rank, size = self.world.rank, self.world.size
        return [problem for part in agree(self.backend, lambda: verify(path, rank, size)) for problem in part]

    def _restore(self, path: str) -> None:
        reader = PortableReader(path)
        self.warm_up(reader.step)
        agree(self.backend, lambda: self.backend.import_state(reader))
        agree(self.backend, lambda: self._restore_extra(reader))
        reader.close()
        self._note_origin(reader)
        self._say(
            logging.INFO,
            "going on from %s (step %d, saved by %d ranks)",
            path,
            reader.step,
            reader.world_size,
        )

    def _restore_extra(self, reader: PortableReader) -> None:
        saved = reader.extra
        for item in fields(Progress):
            if item.name in saved["progress"]:
                setattr(self.progress, item.name, saved["progress"][item.name])
        if self.scheduler is not None and saved.get("scheduler") is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        elif (self.scheduler is None) != (saved.get("scheduler") is None):
            had, has = ("no", "one") if self.scheduler is not None else ("one", "no")
            self._say(
                logging.WARNING,
                "%s has %s scheduler state and this run has %s scheduler",
                reader.path,
                had,
                has,
            )
        self.restore_callbacks(saved.get("callbacks", []))
        extras = [reader.rank_extra(rank) or {} for rank in range(reader.world_size)]
        if all("records" in extra for extra in extras):
            self.restore_records([extra["records"] for extra in extras])
        self._restore_stream(reader)
        # Last, since what comes before may draw random numbers.
        own = reader.rank_extra(self.world.rank) if reader.world_size == self.world.size else None
        if own is not None and "rng" in own:
            restore_rng(own["rng"])

    def _note_origin(self, reader: PortableReader) -> None:
        self._lineage = reader.extra.get("lineage")
        self._origin_step = reader.step
        self._claimed = False
        if self.checkpointer is None:
            return
        if os.path.dirname(reader.path) == self.checkpointer.directory:
            self.history.checkpoint = reader.path
            # A kill between a save and its mark leaves the mark to us.
            if reader.extra.get("best") and self.config.checkpoint.keep_best:
                self._mark(self.checkpointer, reader.path)
        self.history.best_checkpoint = on_rank_zero(self.backend, self._known_best)

    def _known_best(self) -> str | None:
        best = self.checkpointer.best() if self.checkpointer is not None else None
        own = best is not None and PortableCheckpointer.lineage(best) == self._lineage
        return best if own else None

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

    def _say(self, level: int, message: str, *values: Any) -> None:
        if self.world.rank == 0:
            logger.log(level, message, *values)
