"""Reports of failed ranks, and which of several failures is the cause."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from distributed.errors import UserError, WorkerError
from distributed.resilience.phase_journal import current

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["GRACE", "FailureBoard", "error_of", "is_second_hand", "report_of", "say"]

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


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print `text` to `stream`, by default stderr. Errors of a closed stream are ignored, so that they
    do not hide the reported failure."""
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def report_of(error: BaseException, rank: int) -> dict[str, Any]:
    """`error` as plain values: rank, host, time, message, traceback."""
    report: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "exc_type": type(error).__name__,
        "what": f"raised {type(error).__name__}: {error}",
        "second_hand": is_second_hand(error),
        "traceback": "".join(traceback.format_exception(error)),
        **_position(),
    }
    if isinstance(error, SystemExit):
        report["what"] = f"called sys.exit({error.code!r})"
    if isinstance(error, WorkerError):
        report |= {
            "rank": error.rank,
            "host": error.host,
            "exc_type": error.exc_type,
            "summary": error.summary,
            "traceback": error.worker_traceback,
            "phase": error.phase,
            "step": error.step,
        }
    if isinstance(error, UserError):
        report["user_error"] = {
            "message": error.message,
            "field": error.field,
            "allowed": error.allowed,
            "got": _plain(error.got),
            "remedy": error.remedy,
        }
    return report


def _position() -> dict[str, Any]:
    """Phase and step from this rank's journal, and its memory limit."""
    import resource

    journal, limit = current(), resource.getrlimit(resource.RLIMIT_AS)[0]
    entry = journal.entry() if journal else None
    found: dict[str, Any] = {} if limit == resource.RLIM_INFINITY else {"memory_limit": f"{limit >> 20} MiB"}
    if entry is not None:
        phase = entry.outer if entry.phase == "communication" else entry.phase
        found |= {"phase": phase, "step": entry.step, "place": entry.place()}
    return found


def is_second_hand(error: BaseException) -> bool:
    """Whether `error` is only a lost connection to another rank."""
    text = f"{type(error).__name__}: {error}".lower()
    return isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _SECOND_HAND)


def error_of(report: Mapping[str, Any], others: Sequence[int] = ()) -> UserError | WorkerError:
    """The error that `report` stands for.

    Args:
        report: report made by `report_of`.
        others: ranks that failed afterwards.
    """
    if report.get("user_error") is not None:
        return UserError(**report["user_error"])
    summary = report.get("summary") or (
        f"rank {report['rank']} ({report['host']}, pid {report['pid']}) {report['what']}"
    )
    if report["second_hand"]:
        summary += " - lost its connection to another rank; see that rank's output for the cause"
    if others and not report.get("blamed"):
        summary += f" (then rank {', '.join(map(str, others))})"
    if report.get("account"):
        summary += f". {report['account']}"
    elif report.get("place") and not report.get("summary"):
        summary += f". The rank was in {report['place']}."
    return WorkerError(
        summary,
        rank=report["rank"],
        host=report["host"],
        exc_type=report["exc_type"],
        worker_traceback=report.get("traceback", ""),
        phase=report.get("phase"),
        step=report.get("step"),
    )


class FailureBoard:
    """Exchanges the causes of failures between ranks that no single process monitors.

    A thread that waits on the store would be faster, but a thread blocked in the store aborts the
    user's process when it leaves the interpreter.

    Args:
        store: the ranks' store.
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def settle(
        self,
        error: BaseException,
        found: Callable[[BaseException], Mapping[str, Any] | None] = lambda error: None,
    ) -> BaseException:
        """The error that this rank should raise: `error` if it is a cause, otherwise the cause that
        another rank, or the monitor of this host, reports within `GRACE` seconds.

        Args:
            error: error of this rank.
            found: function that returns the monitor's report of a lost rank, or None.
        """
        try:
            if not is_second_hand(error):
                self.store.compare_set("failed/first", "", json.dumps(report_of(error, self.rank)))
                return error
            deadline = time.monotonic() + GRACE
            while not self.store.check(["failed/first"]):
                if (seen := found(error)) is not None:
                    self.store.compare_set("failed/first", "", json.dumps(seen))
                elif time.monotonic() > deadline:
                    return error
                else:
                    time.sleep(_LOOK)
            return error_of(json.loads(self.store.get("failed/first")))
        except RuntimeError:
            return error  # the store went with the rank that served it
        finally:
            self._acknowledge()

    def linger(self) -> None:
        """Wait until another rank has read the board, `GRACE` seconds at most: launchers kill
        all ranks soon after the first exit."""
        reader = 0 if self.rank else 1
        try:
            self.store.wait([f"failed/heard/{reader}"], timedelta(seconds=GRACE))
        except RuntimeError:
            return

    def _acknowledge(self) -> None:
        try:
            self.store.set(f"failed/heard/{self.rank}", "1")
        except RuntimeError:
            return


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
