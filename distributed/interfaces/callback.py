"""Callback: per-step work in fixed bands, on all ranks or on rank 0."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.backend import Backend
    from distributed.interfaces.history import History
    from distributed.interfaces.placement import World
    from distributed.interfaces.task import Progress

__all__ = ["Band", "Callback", "Context"]

_SYNONYMS = {
    **dict.fromkeys(("train", "training", "fit"), "run"),
    **dict.fromkeys(("batch", "iteration", "optimizer"), "step"),
    **dict.fromkeys(("val", "eval", "evaluate", "evaluation", "test"), "validation"),
    **dict.fromkeys(("begin", "before"), "start"),
    **dict.fromkeys(("finish", "stop", "after"), "end"),
    **dict.fromkeys(("save", "saved"), "checkpoint"),
}
"""Words of other libraries' events, and ours."""


class Band(IntEnum):
    """The order in which callbacks act: what is measured, decided, written, then saved."""

    METRICS = 0
    DECIDE = 10
    TRACK = 20
    CHECKPOINT = 30


class Context(ABC):
    """What a callback sees of the run.

    Attributes:
        config: the run's configuration.
        world: this rank's place.
        backend: for collectives of callbacks on all ranks, which call them at the same step.
        progress: cursor and counters; read-only by convention.
        history: what has been recorded so far (rank 0's is the one returned).
        model: the user's module, unwrapped.
        optimizer: the optimizer in use.
        steps_per_epoch: optimizer steps in an epoch, None when the data has no length.
        total_steps: `progress.step` at which this `fit` ends, None when unknown.
    """

    config: DistributedConfig
    world: World
    backend: Backend
    progress: Progress
    history: History
    model: Any
    optimizer: Any
    steps_per_epoch: int | None
    total_steps: int | None

    @abstractmethod
    def request_stop(self, reason: str, *, final: bool = True) -> None:
        """Ask for a stop. All ranks stop after the same step, at the next log step at the
        latest, whichever rank asked (C8). With ``checkpoint_dir`` that step is saved.

        Args:
            reason: `History.stop_reason`; the first one counts.
            final: the decision belongs to the saved state, so that a resumed run ends at once. False for a
                reason outside of the training, such as a time limit: a resumed run continues.
        """

    def whole_model(self) -> AbstractContextManager[Any]:
        """The model as in one process, to read: sample from it, average or export it. Collective: callbacks
        on all ranks enter it at the same step.

        Every rank gets all parameters, under sharded backends in a copy that needs their memory until the
        end of the block. It is in evaluation mode without gradients; random numbers are restored afterwards.

        Raises:
            UserError: the callback acts on rank 0 alone, or has changed the model.
        """
        return self.backend.whole_model()

    @abstractmethod
    def log(self, name: str, value: float) -> None:
        """Add a number to the log record that the current step belongs to, and with it to `History.logs`.

        In `on_step_end` that is the next record. In `on_log`, `on_validation_end` and `on_epoch_end` it is
        the record of the step just taken, which is the last one. On rank 0; elsewhere it is ignored.
        """


class Callback:
    """Override what you need. A method left alone costs nothing.

    Attributes:
        band: when to act among the other callbacks.
        all_ranks: act on every rank; otherwise on rank 0 alone.

    When `fit` has started the ranks, the attributes of rank 0's callbacks return to the caller's at the end.
    """

    band: Band = Band.METRICS
    all_ranks: bool = False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know, as plain data; saved in every checkpoint, from rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, on every rank that has this callback."""

    def on_run_start(self, context: Context) -> None:
        """Ranks are up, model and data are ready, state is loaded."""

    def on_step_end(self, context: Context) -> None:
        """An optimizer step was taken. Called every step: keep it free of synchronisation."""

    def on_log(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Every `log_every_n_steps`: reduced metrics as plain numbers."""

    def on_validation_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Validation metrics, reduced and equal on all ranks."""

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        """An epoch is complete; `metrics` holds its training and validation metrics."""

    def on_incomplete_epoch(self, context: Context, metrics: Mapping[str, float]) -> None:
        """The run ends within an epoch, by ``max_steps`` or a stop. It counts as no epoch: a resumed run
        completes it. `metrics` holds those of its steps, and of the validation after them."""

    def on_checkpoint(self, context: Context, path: str) -> None:
        """A checkpoint was committed at `path`."""

    def on_run_end(self, context: Context, status: str) -> None:
        """The run is over: `status` is ``finished``, ``stopped`` or ``failed``."""


def listed(callbacks: Any) -> list[Callback]:
    """The callbacks that a user has given.

    Raises:
        UserError: about `callbacks`: it is no list, holds something else, or has a method for no event.
    """
    if callbacks is None:
        return []
    found: list[Any] = [callbacks] if isinstance(callbacks, Callback | type) else list(callbacks)
    other = next(
        (one for one in found if not isinstance(one, type) and not hasattr(one, "on_step_end")), None
    )
    if other is not None:
        raise UserError(
            "not a callback",
            field="callbacks",
            got=getattr(other, "__name__", type(other).__name__),
            allowed="objects of distributed.Callback",
            remedy="Derive a class from distributed.Callback, and override on_step_end or another event",
        )
    wrong = next((one for one in found if isinstance(one, type)), None)
    if wrong is not None or isinstance(callbacks, Callback):
        name = (wrong or type(callbacks)).__name__
        raise UserError(
            "not a list of callbacks",
            field="callbacks",
            got=name,
            allowed="a list of objects",
            remedy=f"Give callbacks=[{name}()]",
        )
    for one in found:
        _check_events(type(one))
    return found


def _check_events(kind: type) -> None:
    """Raise a UserError for a method that is named like an event, and that nothing would call."""
    events = [name for name in vars(Callback) if name.startswith("on_")]
    unknown = [n for n in dir(kind) if n.startswith("on_") and n not in events and callable(getattr(kind, n))]
    for name in unknown:
        words = [_SYNONYMS.get(word, word) for word in name.split("_")]
        near = max(events, key=lambda event: _likeness(words, event))
        raise UserError(
            f"there is no event '{name}', so that {kind.__name__}.{name} would never be called. The nearest"
            f" is {near}: {(getattr(Callback, near).__doc__ or '').partition('.')[0]}",
            field="callbacks",
            got=name,
            allowed=", ".join(events),
            remedy=f"Rename it to {near}, or to a name that does not begin with on_ if it is your own helper",
        )


def _likeness(words: list[str], event: str) -> tuple[int, int, float]:
    """Number of common words without and with ``start`` and ``end``, then how alike the names are."""
    common = set(words) & set(event.split("_"))
    ratio = difflib.SequenceMatcher(None, "_".join(words), event).ratio()
    return len(common - {"start", "end"}), len(common), ratio
