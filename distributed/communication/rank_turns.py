"""RankTurns: ranks of a run as threads of one process, of which one runs at a time."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["LostRank", "ProcessState", "RankFailure", "RankTurns"]


class LostRank(ConnectionError):
    """A rank waits for another one that has failed, or was itself left behind."""


class ProcessState(Protocol):
    """State that each rank has of its own where ranks are processes, such as that of random generators."""

    def capture(self) -> Any:
        """The state now."""

    def restore(self, state: Any) -> None:
        """Make `state`, as `capture` returned it, the state of this process."""


@dataclass(frozen=True)
class RankFailure:
    """Error with which a rank ended.

    Attributes:
        rank: its number.
        error: what it raised.
    """

    rank: int
    error: BaseException


class RankTurns:
    """Threads that are ranks, and which of them has the turn.

    Only the rank with the turn runs. It passes the turn on where it waits for others (`wait`), and the state
    of the process goes with it: each rank finds what it left. So ranks draw their own random numbers, change
    settings of a library without an effect on others, and take turns in the same order in every run. If
    every rank waits, none can ever continue: that is an error at once.

    Args:
        size: number of ranks.
        state: what ranks exchange with the turn.
        timeout: seconds that a turn may last before the rank counts as lost.
    """

    def __init__(self, size: int, state: ProcessState, timeout: float) -> None:
        self.size, self.timeout, self._state = size, timeout, state
        self._changed = threading.Condition()
        self._turn, self._began = 0, time.monotonic()
        self._alive: set[int] = set()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._failures: list[RankFailure] = []
        self._threads: dict[int, threading.Thread] = {}
        self._first: Any = None

    def run(self, work: Callable[[int], None]) -> list[RankFailure]:
        """Call ``work(rank)`` on each rank, and return the failures in the order in which they happened.

        A rank that takes longer than the timeout between two waits is left behind, as a thread that can no
        longer take a turn; its failure holds its stack.
        """
        self._first = self._state.capture()
        self._alive = set(range(self.size))
        for rank in range(self.size):
            thread = threading.Thread(
                target=self._run_rank, args=(rank, work), name=f"rank {rank}", daemon=True
            )
            self._threads[rank] = thread
        self._began = time.monotonic()
        for thread in self._threads.values():
            thread.start()
        try:
            self._await_end()
        finally:
            self._state.restore(self._first)
        return self._failures

    def _await_end(self) -> None:
        with self._changed:
            while self._alive:
                left = self._began + self.timeout - time.monotonic()
                if left <= 0:
                    self._leave_behind(self._turn)
                else:
                    self._changed.wait(left)

    def _leave_behind(self, rank: int) -> None:
        thread = self._threads[rank]
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        limit = f"within {self.timeout:g} s"
        what = f"rank {rank} did not wait for another rank, or end, {limit}. Its stack:\n{stack}"
        self._end(rank, TimeoutError(what))

    def _run_rank(self, rank: int, work: Callable[[int], None]) -> None:
        error: BaseException | None = None
        try:
            with self._changed:
                self._await_turn(rank)
            self._state.restore(self._first)
            work(rank)
        except BaseException as raised:  # noqa: BLE001 - returned by `run`
            error = raised
        with self._changed:
            if rank in self._alive:
                self._end(rank, error)

    def _end(self, rank: int, error: BaseException | None) -> None:
        """Take `rank` out of the turns. Needs the lock."""
        self._alive.discard(rank)
        self._waiting.pop(rank, None)
        if error is not None:
            self._failures.append(RankFailure(rank, error))
        if self._turn == rank:
            self._pass_on(rank)
        self._changed.notify_all()

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready()``.

        Args:
            rank: the rank that calls, and has the turn.
            ready: looked at while other ranks have the turn.
            what: what it waits for, as the rest of a sentence that begins with "rank 0 waits".

        Raises:
            LostRank: another rank has failed.
            RuntimeError: all ranks wait, or it is not the rank's own thread that calls.
        """
        if threading.current_thread() is not self._threads.get(rank):
            raise RuntimeError(
                f"a thread that rank {rank} has started waits {what}, and only the rank's own thread can:"
                " ranks that are threads have no others"
            )
        if ready():
            return
        left = self._state.capture()
        with self._changed:
            self._waiting[rank] = ready, what
            self._pass_on(rank)
            self._await_turn(rank)
            self._waiting.pop(rank, None)
        self._state.restore(left)
        if not ready():
            raise self._never(rank, what)

    def _await_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._turn == rank or rank not in self._alive)
        if rank not in self._alive:
            raise LostRank(f"rank {rank} was left behind: timed out")

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can run; if there is none, to one that then fails. Needs the
        lock."""
        order = [number % self.size for number in range(rank + 1, rank + 1 + self.size)]
        alive = [other for other in order if other in self._alive]
        ready = [other for other in alive if other not in self._waiting or self._waiting[other][0]()]
        if alive:
            self._turn, self._began = (ready or alive)[0], time.monotonic()
            self._changed.notify_all()

    def _never(self, rank: int, what: str) -> Exception:
        """Describe what `rank` waits for."""
        if self._failures:
            first = self._failures[0]
            name = type(first.error).__name__
            return LostRank(
                f"rank {rank} waits {what}: connection closed by peer: {name} on rank {first.rank}"
            )
        waits = [f"rank {other} waits {why}" for other, (_, why) in sorted(self._waiting.items())]
        others = "; ".join(waits) or "the other ranks have ended"
        return RuntimeError(f"no rank can continue: rank {rank} waits {what}; {others}")
