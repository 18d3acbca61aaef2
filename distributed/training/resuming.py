"""Resumer: how a run continues from a saved state."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.collective_errors import complete, on_rank_zero
from distributed.checkpoint.file_names import MANIFEST
from distributed.checkpoint.object_store import located
from distributed.checkpoint.optimizer_state import IMPLEMENTATION, KIND
from distributed.checkpoint.overlaid_reader import OverlaidReader
from distributed.checkpoint.reader import PortableReader, verify
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.training.low_communication.saved_state import is_apart
from distributed.training.saving import Saver, log_on_rank_zero
from distributed.training.seeding import isolated_rng


class Resumer:
    """Loads what a `Saver` saved, and what an earlier `fit` left. All methods are collective: every rank
    calls them at the same point, and all return or raise the same.

    Args:
        saver: the run's; shares its configuration, state and backend.
    """

    def __init__(self, saver: Saver) -> None:
        self.saver = saver
        self._saved_hyperparameters: list[dict[str, Any]] = []
        self._fits = True

    def resume(self) -> bool:
        """Resume by ``resume_from_checkpoint``; False when it is False, or when it is True and there
        is no good checkpoint yet.

        Raises:
            UserError: the path given is no checkpoint or a damaged one, or is of another model.
        """
        found = self._load_newest()
        if found:
            self._compare_hyperparameters()
        return found

    def _load_newest(self) -> bool:
        config, backend, own = self.saver.config, self.saver.backend, self.saver.checkpointer
        source: bool | str = config.resume_from_checkpoint
        if config.is_elastic and own is not None:
            # Before the first round other runs' checkpoints were moved out of the directory.
            source = source if on_rank_zero(backend, own.latest) is None else True
        if source is False or (source is True and own is None):
            return False
        files, directory = located(str(config.checkpoint_dir if source is True else source))
        explicit = None if source is True else directory
        if explicit and on_rank_zero(backend, lambda: files.exists(os.path.join(explicit, MANIFEST))):
            self.load(explicit)
            return True
        store = PortableCheckpointer(directory, keep_last=None)
        for path in on_rank_zero(backend, lambda: list(store.candidates())):
            problems = self._problems(path)
            if not problems:
                self._restore(path)
                return True
            log_on_rank_zero(backend, logging.WARNING, "passing over %s: %s", path, problems[0])
        if explicit:
            there = on_rank_zero(backend, lambda: files.exists(explicit))
            raise UserError(
                "no good checkpoint there" if there else "no such file or directory",
                field="resume_from_checkpoint",
                got=explicit,
                allowed="true for checkpoint_dir, a checkpoint (step_NNNNNNNN) or a directory of checkpoints",
                remedy="List what a directory holds with `checkpoint ls`; a file of weights alone is loaded"
                " into the model before the run",
            )
        message = "no checkpoint in %s yet: starting from the beginning"
        log_on_rank_zero(backend, logging.INFO, message, directory)
        return False

    def load(self, path: str, given: str | None = None) -> None:
        """Load the checkpoint at `path`: model, optimizer, scaler, scheduler, progress, and this
        rank's random number generators when as many ranks with the same axes saved it.

        Args:
            given: path of another one, whose model, optimizer and scheduler are loaded in place of these.

        Raises:
            UserError: it is missing, damaged, or of another model or optimizer.
        """
        problems = self._problems(path)
        if problems:
            raise UserError(
                f"the checkpoint cannot be used: {problems[0]}", got=path, remedy="Load another one"
            )
        self._restore(path, given)

    def take_given(self, path: str) -> None:
        """Load what the caller's model and optimizer hold, which have been trained before."""
        backend, reader = self.saver.backend, PortableReader(path)
        complete(backend, lambda: backend.import_state(reader))
        reader.close()

    def continue_fit(self, left: Mapping[str, Any], scheduler: Any) -> None:
        """Continue from what an earlier `fit` in this process left: see `TrainingLoop.leftover_state`.

        Args:
            scheduler: as the caller gave it. An object holds its state, which the caller may have changed.
        """
        state, world = self.saver.state, self.saver.backend.world
        saved = left["snapshot"]
        state.open_epoch.restore([saved.rank["records"]] * world.size, world.rank, world.size)
        self.warm_up(state.progress.step)
        self.saver.continue_fit(state.progress.step, left["best_checkpoint"])
        # The caller's callbacks are the same objects, and may have been reset.
        kept = {"scheduler": None} if hasattr(scheduler, "state_dict") else {}
        state.restore({**saved.common, "callbacks": [], **kept}, saved.rank)

    def warm_up(self, step: int) -> None:
        """Run one throw-away step before the state after optimizer step `step` is loaded, so that lazily
        built engine state (such as DDP's buckets) matches an uninterrupted run. Under ``deterministic``
        a resumed run then computes the same bits (C10)."""
        feed = self.saver.state.feed
        if self.saver.config.deterministic and step > 0 and feed is not None:
            with isolated_rng():
                # Opened where it is read: a sampler draws its order then.
                self.saver.backend.warm_up(window for epoch in (0,) for window in feed.windows(epoch))
            feed.rewind()

    def _problems(self, path: str) -> list[str]:
        """Why a checkpoint cannot be read; the ranks divide the reading among them."""
        backend = self.saver.backend
        rank, size = backend.world.rank, backend.world.size
        found: list[str] = []
        complete(backend, lambda: found.extend(verify(path, rank, size)))
        if not backend.all_reduce([float(len(found))])[0]:
            return []
        return [problem for part in backend.gather_objects(found) for problem in part]

    def _restore(self, path: str, given: str | None = None) -> None:
        try:
            self._restore_all(path, given)
        except UserError as error:
            details = error.details
            if not self._fits:
                remedy = f"{error.remedy or 'Resume from another checkpoint'}, or let a new run take only the"
                details["remedy"] = f"{remedy} weights: set init_from={path} and another checkpoint_dir"
            raise UserError(f"cannot resume from {path}: {error.message}", **details) from None

    def _restore_all(self, path: str, given: str | None) -> None:
        backend, state = self.saver.backend, self.saver.state
        reader = PortableReader(path) if given is None else OverlaidReader(path, given)
        self.warm_up(reader.step)
        self.saver.frozen.check(reader.omitted)
        _check_one_model(reader, backend)
        self._fits = False
        complete(backend, lambda: backend.import_state(reader))
        self._fits = True
        complete(backend, lambda: self._restore_state(reader))
        # One rank reads them all: in an object store each is a request.
        records = on_rank_zero(backend, lambda: _records_of(reader))
        if records:
            state.open_epoch.restore(records, backend.world.rank, backend.world.size)
        reader.close()
        self.saver.continue_from(reader.path, reader.step, bool(reader.extra.get("best")))
        message = "resumed from %s (step %d, saved by %d ranks)"
        log_on_rank_zero(backend, logging.INFO, message, path, reader.step, reader.world_size)

    def _restore_state(self, reader: PortableReader) -> None:
        state, backend, saved = self.saver.state, self.saver.backend, reader.extra
        has, had = state.schedule.scheduler is not None, saved.get("scheduler") is not None
        if has != had:
            message = "%s has %s scheduler state and this run has %s scheduler"
            words = ("one" if had else "no", "one" if has else "no")
            log_on_rank_zero(backend, logging.WARNING, message, reader.path, *words)
        same_size = reader.world_size == backend.world.size
        # Ranks that share a model draw the same numbers; on another mesh these would be other ranks.
        same_size = same_size and saved.get("model_axes", "") == state.model_axes
        own = (reader.rank_extra(backend.world.rank) or {}) if same_size else {}
        rank = {"rng": own["rng"]} if "rng" in own else {}
        state.restore(saved, {**rank, **self._stream(reader, own)})
        self._saved_hyperparameters = saved.get("hyperparameters") or []

    def _compare_hyperparameters(self) -> None:
        """Report which of two values wins where the optimizer was built with others than in the run that
        saved; the state of the optimizer brings its own."""
        takes_given = self.saver.config.checkpoint.hyperparameters == "given"
        for own, saved in zip(self.saver.state.hyperparameters, self._saved_hyperparameters, strict=False):
            rates = [group.get("initial_lr", group.get("lr")) for group in (own, saved)]
            others = own.keys() & saved.keys() - IMPLEMENTATION - {"lr", "initial_lr"}
            compared: list[tuple[str, Any, Any]] = [("lr", rates[0], rates[1])]
            for name, here, there in [*compared, *((n, own[n], saved[n]) for n in sorted(others))]:
                if repr(here) == repr(there):
                    continue
                is_field = name == "lr" and here == self.saver.config.learning_rate
                values = "learning_rate" if is_field else name, here, there
                if takes_given or name in KIND:
                    log_on_rank_zero(
                        self.saver.backend,
                        logging.INFO if takes_given else logging.WARNING,  # it was asked for
                        "the optimizer is built with %s=%s, in place of the checkpoint's, %s",
                        *values,
                    )
                    continue
                own |= dict.fromkeys(["lr", "initial_lr"] if name == "lr" else [name], there)
                log_on_rank_zero(
                    self.saver.backend,
                    logging.WARNING,
                    "%s=%s has no effect: the run continues with the checkpoint's, %s. Set"
                    " checkpoint.hyperparameters=given to change it",
                    *values,
                )

    def _stream(self, reader: PortableReader, own: Mapping[str, Any]) -> dict[str, Any]:
        """Where in an iterable dataset the epoch was saved, if it was inside one.

        Raises:
            UserError: the dataset shards itself, and was saved by another number of ranks.
        """
        state, size = self.saver.state, self.saver.backend.world.size
        if state.feed is None or not reader.extra["progress"].get("samples"):
            return {}
        if state.shares_stream:
            return {"stream": (reader.rank_extra(0) or {}).get("stream")}
        if reader.world_size != size:
            raise UserError(
                "a dataset that shards itself can be resumed mid-epoch only on the same number of ranks:"
                f" {reader.world_size} ranks saved it",
                field=state.feed.source.argument,
                got=f"{size} ranks",
                allowed=f"{reader.world_size} ranks, or any number at the beginning of an epoch",
                remedy="Or let every rank read the whole stream: leave shards_itself out",
            )
        return {"stream": own.get("stream")}


def _check_one_model(reader: PortableReader, backend: Backend) -> None:
    """Raise a UserError if ranks had parameters of their own, and `backend` reads one model."""
    if is_apart(reader) and not backend.reads_own_parameters:
        raise UserError(
            "it was saved between two outer steps, and holds parameters of each rank's own",
            field="low_communication.mode",
            got="none",
            allowed="local-sgd, diloco, streaming-diloco",
            remedy="Resume with the low_communication section that saved it, or from the checkpoint of an"
            " epoch's end, where all ranks had the same weights",
        )


def _records_of(reader: PortableReader) -> list[dict[str, Any]]:
    """Every rank's records of the current epoch; empty unless the checkpoint has them of all ranks."""
    found = [(reader.rank_extra(rank) or {}).get("records") for rank in range(reader.world_size)]
    present = [records for records in found if records is not None]
    return present if len(present) == len(found) else []
