"""The errors that a user may see, and their form.

A :class:`UserError` is a mistake that the user can fix: it prints as one paragraph and
exits with 2. A :class:`WorkerError` is a failure of one rank: it keeps the rank's own
traceback. `Preempted` is no failure: it ends a run that a scheduler stopped with a signal. There is
no other exception hierarchy in the project.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "EXIT_MISTAKE",
    "EXIT_PREEMPTED",
    "Preempted",
    "UserError",
    "WorkerError",
    "did_you_mean",
    "hide_own_frames",
    "listed",
    "remedy_of",
    "stopped_by",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_HIDDEN = {
    *("distributed", "distributed_backends", "distributed_plugins", "distributed_kernels"),
    *("contextlib", "pluggy", "pydantic"),  # between two frames of ours
}
"""Top-level packages without a line that a user could change."""

EXIT_MISTAKE = 2
"""Exit code after a `UserError`."""
EXIT_PREEMPTED = 75
"""Exit code of a preempted run that has saved (EX_TEMPFAIL)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def listed(numbers: Sequence[int], limit: int = 64) -> str:
    """``0, 2, 5``; of more than `limit` numbers, the first, and how many more there are."""
    more = len(numbers) - limit
    return ", ".join(map(str, numbers[:limit])) + (f" and {more} more" if more > 0 else "")


class UserError(Exception):
    """A mistake in the user's input: one paragraph that ends with the remedy.

    Args:
        message: what failed, in one or more sentences.
        field: config field, flag or argument.
        got: value received.
        allowed: allowed values, as text.
        remedy: how to fix it.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        got: object = None,
        allowed: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message, self.field, self.got = message, field, got
        self.allowed, self.remedy = allowed, remedy
        super().__init__(self.paragraph())

    @property
    def details(self) -> dict[str, Any]:
        """The arguments that follow the message."""
        return {"field": self.field, "got": self.got, "allowed": self.allowed, "remedy": self.remedy}

    def paragraph(self) -> str:
        """The whole error as one paragraph without line breaks and without secrets."""
        from distributed.redaction import redact, redact_text

        parts = [_ended(self.message.rstrip())]
        if self.field is not None:
            parts.insert(0, f"{self.field}:")
        if self.got is not None:
            parts.append(f"Got {redact(self.got, self.field or '')!r}.")
        if self.allowed is not None:
            parts.append(f"Allowed: {_ended(self.allowed)}")
        if self.remedy is not None:
            parts.append(_ended(self.remedy))
        return " ".join(" ".join(redact_text(part).split()) for part in parts)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(UserError, self.message, **self.details), ()


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(("?", ".")) else f"{sentence}."


class Preempted(SystemExit):
    """A signal has stopped the run, which saved first if there was anything to save. The exit code is
    `EXIT_PREEMPTED`, by which a scheduler can requeue it.

    Attributes:
        signal: name of the signal, ``SIGTERM`` or ``SIGUSR1``.
        step: number of optimizer steps done.
        checkpoint: path of that step's checkpoint; empty before the first one.
    """

    def __init__(self, signal: str, step: int, checkpoint: str) -> None:
        self.signal, self.step, self.checkpoint = signal, step, checkpoint
        super().__init__(EXIT_PREEMPTED)

    def __str__(self) -> str:
        return _describe_stop(self.signal, self.step, self.checkpoint)


def stopped_by(signal: str, step: int, checkpoint: str) -> Preempted | KeyboardInterrupt:
    """The exception that ends a run which a signal has stopped."""
    if signal == "SIGINT":
        # No subclass: with one, Python would exit with 1 instead of ending by the signal.
        return KeyboardInterrupt(_describe_stop(signal, step, checkpoint))
    return Preempted(signal, step, checkpoint)


def _describe_stop(signal: str, step: int, checkpoint: str) -> str:
    if not checkpoint:
        return f"stopped by {signal} before the first checkpoint; rerun the same command to start over"
    return (
        f"stopped by {signal}: step {step} is saved in {checkpoint};"
        " run the same command with --resume to continue"
    )


class WorkerError(RuntimeError):
    """A rank failed. The message names rank, host and cause; the rank's traceback follows. Secrets are left
    out of both.

    Attributes:
        rank: first rank that failed; -1 when the launcher itself failed.
        host: host of that rank.
        exc_type: name of the exception's class, or of the signal (``SIGKILL``).
        worker_traceback: traceback as printed in the rank, or the stack of a rank that hung; empty
            after a signal.
        phase: phase of the rank (`phase_journal.JOURNAL_PHASES`); None without a journal.
        step: number of the rank's optimizer step, from 1; 0 before the first; None without a journal.
        chosen_batch: number of ranks, and samples of the micro-batch that they chose; None without a choice.
        exc_bases: names of the classes above that of the exception, nearest first, as far as they are known.
    """

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        host: str,
        exc_type: str,
        worker_traceback: str = "",
        phase: str | None = None,
        step: int | None = None,
        chosen_batch: Sequence[int] | None = None,
        exc_bases: Sequence[str] = (),
    ) -> None:
        from distributed.redaction import redact_text

        summary, worker_traceback = redact_text(summary), redact_text(worker_traceback)
        self.summary, self.rank, self.host = summary, rank, host
        self.exc_type, self.exc_bases = exc_type, tuple(exc_bases)
        self.worker_traceback = worker_traceback
        self.phase, self.step, self.chosen_batch = phase, step, chosen_batch
        super().__init__(self._text())

    def extend(self, text: str) -> None:
        """Add sentences to the message, before the rank's traceback."""
        from distributed.redaction import redact_text

        self.summary = f"{self.summary} {redact_text(text)}"
        self.args = (self._text(),)

    def _text(self) -> str:
        trace = self.worker_traceback
        return (f"{self.summary}\n\n{trace}" if trace else self.summary).rstrip()


def remedy_of(error: Exception, remedies: Mapping[str, str]) -> str | None:
    """The first of `remedies` whose regular expression the message of `error` contains."""
    return next((remedy for pattern, remedy in remedies.items() if re.search(pattern, str(error))), None)


def hide_own_frames(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a public entry point: a `UserError` leaves it with the frames of the user's code alone.

    The error concerns a line of the user, which would otherwise stand above many lines of this library.
    Other exceptions keep their frames, and so does a UserError under ``python -X dev``.
    """

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        # A bare `raise` takes the traceback as it was set, without a frame of this function.
        try:
            return function(*args, **kwargs)
        except UserError as error:
            if not sys.flags.dev_mode:
                error.__traceback__ = _users_part(error.__traceback__)
            raise
        except BaseException as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise

    return call


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _HIDDEN:
            kept.append(trace)
        trace = trace.tb_next
    for entry in reversed(kept):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace
