"""StopConsensus: all ranks stop after the same step, whichever rank asked (C8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.resilience.preemption import received_signal

if TYPE_CHECKING:
    from distributed.interfaces.backend import Backend
    from distributed.interfaces.history import History
    from distributed.interfaces.task import Progress
    from distributed.training.goal import Goal

__all__ = ["StopConsensus"]


class StopConsensus:
    """Requests to stop and preemption signals, agreed upon by all ranks.

    Args:
        backend: for the collectives.
        progress: the current step.
        history: `stop_reason` and `preempted` are set once the ranks agree.
        goal: a run that has reached it is not preempted.

    Attributes:
        next_check: the step at which the ranks next ask each other about signals, about a second from
            the last time; at steps 1, 2, 4, ... until an interval was timed.
    """

    def __init__(self, backend: Backend, progress: Progress, history: History, goal: Goal) -> None:
        self.backend, self.progress, self.history, self.goal = backend, progress, history, goal
        self._reason: str | None = None
        self._steps_per_second: int | None = None
        self.start()

    def start(self) -> None:
        """Training begins at the current step."""
        self._started_at = self.progress.step
        self.next_check = self.progress.step + 1

    def request(self, reason: str) -> None:
        """Ask for a stop from this rank. The first reason counts."""
        self._reason = self._reason or reason

    @property
    def wishes(self) -> tuple[bool, bool]:
        """(stop, go): whether this rank asks for a stop, and whether it was preempted."""
        return bool(self._reason), received_signal() is not None

    def agree(self) -> None:
        """Decide about stops and signals. Collective."""
        stop, go = self.backend.all_reduce([float(wish) for wish in self.wishes])
        self.apply(stop > 0, go > 0)

    def agree_on_signals(self) -> None:
        """Decide about signals alone, between log steps. Collective.

        A callback's request waits for the log step, because when this is called depends on time.
        """
        self.apply(False, self.backend.all_reduce([float(received_signal() is not None)])[0] > 0)

    def apply(self, stop: bool, go: bool, steps_per_second: float | None = None) -> None:
        """Act on what all ranks know, and choose the next step at which to ask.

        Args:
            stop: a rank asks for a stop.
            go: a rank was preempted.
            steps_per_second: of the slowest rank; None keeps the last value.
        """
        step, history = self.progress.step, self.history
        if steps_per_second is not None:
            self._steps_per_second = max(1, int(steps_per_second))
        self.next_check = step + (self._steps_per_second or max(1, step - self._started_at))
        if stop and history.stop_reason is None:
            reasons = self.backend.gather_objects(self._reason)
            history.stop_reason = next(reason for reason in reasons if reason)
        if go and history.stop_reason is None and not self.goal.reached(self.progress):
            names = self.backend.gather_objects(received_signal())
            history.stop_reason = history.preempted = next(name for name in names if name)
