"""ResumingMixin: how a run goes on from a saved state. StreamsMixin: and where in an iterable dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.collective_errors import agree, on_rank_zero
from distributed.checkpoint.file_names import MANIFEST
from distributed.checkpoint.object_store import located
from distributed.checkpoint.random_state import restore_rng
from distributed.checkpoint.reader import PortableReader, verify
from distributed.config import DistributedConfig
from distributed.data import Feed
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.history import History
from distributed.interfaces.placement import World
from distributed.interfaces.task import Progress

__all__ = ["ResumingMixin", "StreamsMixin"]

logger = logging.getLogger("distributed")


class ResumingMixin:
    """Loading for the training loop's per-rank class. All methods are collective: every rank calls
    them alike, and all return or raise the same.

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

    _lineage: str | None = None
    _origin_step = -1
    _claimed = False

    # -- what else has state; the loop's other parts know -------------------------------

    def _notify(self, event: str, *args: Any) -> None:
        """Tell the callbacks; without any, nobody."""

    def track_checkpoint(self, path: str, step: int) -> None:
        """Tell the trackers; without any, nobody."""

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

    def _stream_state(self) -> Any:
        """What the data needs besides the cursor; without a feed, nothing."""

    def _restore_stream(self, reader: PortableReader) -> None:
        """Put the data back to its place; without a feed, nothing."""

    # -- loading -----------------------------------------------------------------------

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

    def _problems(self, path: str) -> list[str]:
        """What is wrong with a checkpoint; the ranks divide the reading among them."""
        rank, size = self.world.rank, self.world.size
        return [problem for part in agree(self.backend, lambda: verify(path, rank, size)) for problem in part]

    def _restore(self, path: str) -> None:
        reader = PortableReader(path)
        self.warm_up(reader.step)
        agree(self.backend, lambda: self.backend.import_state(reader))
        agree(self.backend, lambda: self._restore_extra(reader))
        # One rank reads them all: of an object store each is a request.
        records = on_rank_zero(self.backend, lambda: _records_of(reader))
        if records:
            self.restore_records(records)
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

    def _mark(self, checkpointer: PortableCheckpointer, path: str) -> None:
        try:
            on_rank_zero(self.backend, lambda: checkpointer.mark_best(path))
        except OSError as error:
            self._say(logging.WARNING, "%s is saved but cannot be marked best: %s", path, error)
        else:
            self.history.best_checkpoint = path

    def _say(self, level: int, message: str, *values: Any) -> None:
        if self.world.rank == 0:
            logger.log(level, message, *values)


def _records_of(reader: PortableReader) -> list[dict[str, Any]]:
    """Every rank's records of the epoch under way; none of a checkpoint that has them not of all."""
    found = [(reader.rank_extra(rank) or {}).get("records") for rank in range(reader.world_size)]
    whole = [records for records in found if records is not None]
    return whole if len(whole) == len(found) else []


class StreamsMixin:
    """What the training loop saves of its data besides the cursor; goes before `CheckpointingMixin`.

    Attributes:
        feed: the training data.
        progress: the cursor.
        world: this rank's place.
    """

    feed: Feed
    progress: Progress
    world: World

    def _stream_state(self) -> Any:
        """What this rank saves of its stream: behind the last step, whatever was read ahead.

        Nothing at an epoch's beginning, nor for data with indices. A stream that all ranks read
        whole is at the same place on each, and rank 0's tells it.
        """
        own = self.feed.source.shards_itself
        return self.feed.state if self.progress.samples and (own or self.world.rank == 0) else None

    def _restore_stream(self, reader: PortableReader) -> None:
        """Let the epoch go on in the stream where it was saved.

        Raises:
            UserError: the stream shards itself, and other ranks were in the middle of it.
        """
        source = self.feed.source
        if source.is_map or not self.progress.samples:
            return
        if source.shards_itself and reader.world_size != self.world.size:
            raise UserError(
                f"{reader.world_size} ranks were in the middle of a dataset that shards itself, and where"
                " another number of ranks would go on in it nobody knows",
                field=source.argument,
                got=f"{self.world.size} ranks",
                allowed=f"{reader.world_size} ranks, or any number at the beginning of an epoch",
                remedy="Or let every rank read the whole stream: leave shards_itself out",
            )
        saved = reader.rank_extra(self.world.rank if source.shards_itself else 0)
        self.feed.restore((saved or {}).get("stream"))
