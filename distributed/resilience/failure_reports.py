"""Reports of failed ranks, and which of several failures is the cause.

A `FailureReport` travels in two ways: as a file in the run's private folder, and as a key of the ranks'
store (`FailureBoard`).
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import UserError, WorkerError
from distributed.redaction import redact, redact_text
from distributed.resilience.hang_diagnosis import name_ranks
from distributed.resilience.memory_failures import bases_of
from distributed.resilience.phase_journal import current
from distributed.system.disk_room import write_with_reserve

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = [
    "GRACE",
    "FailureBoard",
    "FailureReport",
    "find_cause",
    "forget_chosen_batch",
    "is_second_hand",
    "note_chosen_batch",
]

_chosen_batch: tuple[int, int] | None = None
"""What `note_chosen_batch` has noted in this process."""

GRACE = 2.0
"""Seconds that ranks have to report their own failure after the first one."""

_LOOK = 0.05
"""Seconds between polls of the failure board."""

_SECOND_HAND = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket timeout",
    "timed out",
    "connectionerror",
    "recv failed",
    "closed by peer",
    "reset by peer",
    "has been shut down",
)


def is_second_hand(error: BaseException) -> bool:
    """Whether `error` is only a lost connection to another rank."""
    text = f"{type(error).__name__}: {error}".lower()
    return isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _SECOND_HAND)


@dataclass(frozen=True)
class FailureReport:
    """The failure of one rank, in plain values. Secrets are left out of all text.

    Attributes:
        rank: number of the failed rank; -1 when the launcher itself failed.
        exc_type: name of the exception's class, or of the signal (``SIGKILL``).
        what: clause that follows the rank's name in a message.
        time: time of the failure, in seconds since the epoch.
        second_hand: whether the rank only lost its connection to another one.
        traceback: traceback or stack of the rank; empty without one.
        phase: phase of the rank (`phase_journal.JOURNAL_PHASES`); None without a journal.
        step: number of the rank's optimizer step, from 1; None without a journal.
        place: phase and step as text; empty without a journal.
        memory_limit: the process's limit of address space, as text; empty without a limit.
        summary: complete message of a failure that was explained before; empty otherwise.
        account: sentences on where the ranks were and what to try; empty before an explanation.
        blamed: whether the report names another rank than the one that failed first.
        user_error: arguments of the rank's `UserError`; None for other errors.
        chosen_batch: number of ranks, and samples of the micro-batch that they chose; None without a choice.
        exc_bases: names of the classes above that of the exception, nearest first.
    """

    rank: int
    exc_type: str
    what: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)
    second_hand: bool = False
    traceback: str = ""
    phase: str | None = None
    step: int | None = None
    place: str = ""
    memory_limit: str = ""
    summary: str = ""
    account: str = ""
    blamed: bool = False
    user_error: Mapping[str, Any] | None = None
    chosen_batch: Sequence[int] | None = None
    exc_bases: Sequence[str] = ()

    @classmethod
    def from_error(cls, error: BaseException, rank: int) -> FailureReport:
        """The report of `error`, which this process raised as `rank`."""
        report = cls(
            rank,
            type(error).__name__,
            redact_text(f"raised {type(error).__name__}: {error}".removesuffix(": ")),
            second_hand=is_second_hand(error),
            traceback=redact_text("".join(traceback.format_exception(error))),
            chosen_batch=_chosen_batch,
            exc_bases=bases_of(error),
            **_position(),
        )
        if isinstance(error, SystemExit):
            return replace(report, what=redact_text(f"called sys.exit({error.code!r})"))
        if isinstance(error, WorkerError):
            return replace(
                report,
                rank=error.rank,
                host=error.host,
                exc_type=error.exc_type,
                summary=error.summary,
                traceback=error.worker_traceback,
                phase=error.phase,
                step=error.step,
                chosen_batch=error.chosen_batch,
                exc_bases=error.exc_bases,
            )
        return replace(report, user_error=_arguments(error)) if isinstance(error, UserError) else report

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """Parse what `to_json` returned; text after it is ignored."""
        return cls(**json.JSONDecoder().raw_decode(text)[0])

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, folder: Path, rank: int | None = None) -> FailureReport | None:
        """The report that `rank`, or with None the monitor, left in `folder`; None without one."""
        path = _path(folder, rank)
        return cls.from_json(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, folder: Path, rank: int | None = None) -> None:
        """Leave the report in `folder` as the one of `rank`, or with None of the monitor."""
        write_with_reserve(_path(folder, rank), self.to_json().encode())

    @property
    def headline(self) -> str:
        """The failure in one clause or more, with the rank's name."""
        return self.summary or f"rank {self.rank} ({self.host}, pid {self.pid}) {self.what}"

    def to_text(self) -> str:
        """The text of a failure report file."""
        head = f"{self.headline}. {self.account}".rstrip(". ") + "."
        return "\n\n".join(part for part in (head, self.traceback) if part)

    def to_error(self, failed: Iterable[int] = ()) -> UserError | WorkerError:
        """The error that ends the run."""
        if self.user_error is not None:
            return UserError(**self.user_error)
        summary, others = self.headline, sorted({*failed} - {self.rank})
        if self.second_hand:
            summary += " - lost its connection to another rank; see that rank's output for the cause"
        if others and not self.blamed:
            summary += f" ({name_ranks(others)} failed afterwards)"
        if self.account:
            summary += f". {self.account}"
        elif self.place and not self.summary:
            summary += f". The rank was in {self.place}."
        return WorkerError(
            summary,
            rank=self.rank,
            host=self.host,
            exc_type=self.exc_type,
            worker_traceback=self.traceback,
            phase=self.phase,
            step=self.step,
            chosen_batch=self.chosen_batch,
            exc_bases=self.exc_bases,
        )


def note_chosen_batch(num_ranks: int, micro_batch: int) -> None:
    """Let later reports of this process say which micro-batch its ranks have chosen.

    Args:
        num_ranks: number of ranks.
        micro_batch: samples of a micro-batch.
    """
    global _chosen_batch
    _chosen_batch = (num_ranks, micro_batch)


def forget_chosen_batch() -> None:
    """Begin a run, whose reports say nothing of what an earlier one in this process has chosen."""
    global _chosen_batch
    _chosen_batch = None


def find_cause(reports: Iterable[FailureReport]) -> FailureReport:
    """The first report of at least one; lost connections count only if no rank has another cause."""
    return min(reports, key=lambda report: (report.second_hand, report.time))


def _path(folder: Path, rank: int | None) -> Path:
    return folder / ("verdict.json" if rank is None else f"error_{rank}.json")


def _position() -> dict[str, Any]:
    """Phase and step from this rank's journal, and its memory limit."""
    import resource

    journal, limit = current(), resource.getrlimit(resource.RLIMIT_AS)[0]
    entry = journal.entry() if journal else None
    found: dict[str, Any] = {} if limit == resource.RLIM_INFINITY else {"memory_limit": f"{limit >> 20} MiB"}
    if entry is not None:
        found |= {"phase": entry.outer, "step": entry.step, "place": entry.place()}
    return found


def _arguments(error: UserError) -> dict[str, Any]:
    got = redact(error.got, error.field or "")
    plain = got is None or isinstance(got, (bool, int, float, str))
    shown = got if plain else repr(got)
    return {"message": redact_text(error.message), **error.details, "got": shown}


class FailureBoard:
    """Exchanges the causes of failures between ranks that no single process monitors.

    A thread that waits on the store would be faster, but a thread blocked in the store aborts the
    user's process when it leaves the interpreter.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank = store, rank

    def settle(self, error: BaseException, find: Callable[[], FailureReport | None]) -> BaseException:
        """The error that this rank should raise: `error` if it is a cause, otherwise the cause that
        another rank, or the monitor of this host, reports within `GRACE` seconds.

        Args:
            find: function that returns the monitor's report of a lost rank, or None.
        """
        try:
            if not is_second_hand(error):
                self._publish(FailureReport.from_error(error, self.rank))
                return error
            deadline = time.monotonic() + GRACE
            while not self.store.check(["failed/first"]):
                if (found := find()) is not None:
                    self._publish(found)
                elif time.monotonic() > deadline:
                    return error
                else:
                    time.sleep(_LOOK)
            return FailureReport.from_json(self.store.get("failed/first").decode()).to_error()
        except RuntimeError:
            return error  # the store went with the rank that served it
        finally:
            self._acknowledge()

    def _publish(self, report: FailureReport) -> None:
        self.store.compare_set("failed/first", "", report.to_json())

    def linger(self) -> None:
        """Wait until another rank has read the board, `GRACE` seconds at most: launchers kill
        all ranks soon after the first exit."""
        reader = 0 if self.rank else 1
        with suppress(RuntimeError):
            self.store.wait([f"failed/read/{reader}"], timedelta(seconds=GRACE))

    def _acknowledge(self) -> None:
        with suppress(RuntimeError):
            self.store.set(f"failed/read/{self.rank}", "1")
