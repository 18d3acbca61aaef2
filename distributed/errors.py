"""The errors a user can meet, and how each reads.

A :class:`UserError` is a mistake that the user can mend: it prints as one paragraph and
exits with 2. A :class:`WorkerError` is a failure of one rank: it keeps the rank's own
traceback. `Preempted` is no failure: it ends a run that was asked to make room. Nothing else
in the project invents an exception hierarchy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["EXIT_MISTAKE", "EXIT_PREEMPTED", "Preempted", "UserError", "WorkerError", "did_you_mean"]

EXIT_MISTAKE = 2
"""The user gave something that cannot be."""
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: told to go, and saved."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


class UserError(Exception):
    """A mistake in what the user gave: one paragraph that says how to mend it.

    Args:
        message: what is wrong, in one or more sentences.
        field: the config field, flag or argument concerned.
        got: the value received.
        allowed: the values that would do, in words.
        remedy: what to do about it.
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

    def paragraph(self) -> str:
        """The whole error as one paragraph without line breaks."""
        parts = [self.message if self.message.endswith("?") else self.message.rstrip(". ") + "."]
        if self.field is not None:
            parts.insert(0, f"{self.field}:")
        if self.got is not None:
            parts.append(f"Got {self.got!r}.")
        if self.allowed is not None:
            parts.append(f"Allowed: {self.allowed.rstrip('.')}.")
        if self.remedy is not None:
            parts.append(self.remedy.rstrip(".") + ".")
        return " ".join(" ".join(part.split()) for part in parts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_user_error, (self.message, self.field, self.got, self.allowed, self.remedy))


def _rebuild_user_error(
    message: str, field: str | None, got: object, allowed: str | None, remedy: str | None
) -> UserError:
    return UserError(message, field=field, got=got, allowed=allowed, remedy=remedy)


class Preempted(SystemExit):
    """The run was asked to stop and has saved, where there was anything to save: exit code
    `EXIT_PREEMPTED`, so that a scheduler that requeues by exit code starts it again.

    Attributes:
        signal: the name of the signal that asked, ``SIGTERM`` or ``SIGUSR1``.
        step: optimizer steps taken.
        checkpoint: path of the checkpoint of that step; empty when none was saved yet.
    """

    def __init__(self, signal: str, step: int, checkpoint: str) -> None:
        self.signal, self.step, self.checkpoint = signal, step, checkpoint
        super().__init__(EXIT_PREEMPTED)

    def __str__(self) -> str:
        if not self.checkpoint:
            return f"{self.signal}: nothing is saved yet; the same command begins anew"
        return (
            f"{self.signal}: step {self.step} is saved in {self.checkpoint};"
            " the same command with --resume goes on from there"
        )


class WorkerError(RuntimeError):
    """A rank failed. The message names rank, host and cause; the rank's traceback follows.

    Attributes:
        rank: the first rank that failed, or -1 when the launcher itself gave up.
        host: the host it ran on.
        exc_type: the name of the exception's class, or the signal's name (``SIGKILL``).
        worker_traceback: the traceback as printed in the rank, or of one that hung its stack; empty
            after a signal.
        phase: what the rank did (`journal.JOURNAL_PHASES`), None when it kept no journal.
        step: number of the optimizer step it was in, from 1; 0 before the first; None as above.
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
    ) -> None:
        self.summary, self.rank, self.host = summary, rank, host
        self.exc_type, self.worker_traceback = exc_type, worker_traceback
        self.phase, self.step = phase, step
        text = f"{summary}\n\n{worker_traceback}" if worker_traceback else summary
        super().__init__(text.rstrip())
