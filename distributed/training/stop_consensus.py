"""Where training ends: the goal of one `fit`, and a stop that all ranks take after the same step (C8)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distributed.config import DistributedConfig
from distributed.interfaces.backend import Backend
from distributed.interfaces.history import History
from distributed.interfaces.task import Progress
from distributed.resilience.preemption import received_signal


@dataclass(frozen=True)
class Goal:
    """Where training ends, counted over the whole run.

    Attributes:
        epoch: number of complete epochs; infinite when only steps are limited.
        step: number of optimizer steps, None for no limit.
    """

    epoch: float
    step: int | None

    @classmethod
    def of(cls, config: DistributedConfig, start: Progress) -> Goal:
        """The goal of a `fit` that begins at `start`; a second `fit` counts from there."""
        step = None if config.max_steps is None else start.step + config.max_steps
        endless = step is not None and not config.is_explicit("epochs")
        return cls(math.inf if endless else start.epoch + config.epochs, step)

    def exceeds(self, stopped: Progress) -> bool:
        """Whether it lies beyond the goal of a run that a callback has stopped."""
        epochs = math.inf if stopped.stop_epochs is None else stopped.stop_epochs
        steps = math.inf if stopped.stop_steps is None else stopped.stop_steps
        return self.epoch > epochs or (math.inf if self.step is None else self.step) > steps

    def reached(self, progress: Progress) -> bool:
        """Whether all epochs or steps are complete."""
        return progress.epoch >= self.epoch or (self.step is not None and progress.step >= self.step)

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps of the whole run up to the goal, for decaying schedules; None when unknown."""
        limits = [] if self.step is None else [self.step]
        if steps_per_epoch is not None and self.epoch != math.inf:
            limits.append(int(self.epoch) * steps_per_epoch)
        return min(limits, default=None)


def describe_stop(progress: Progress) -> str:
    """Where and why a callback had stopped the run, and how to train further."""
    limits = {"epochs": progress.stop_epochs, "max_steps": progress.stop_steps}
    raised = " or ".join(f"{name} above {limit}" for name, limit in limits.items() if limit is not None)
    return (
        f"the run ended at step {progress.step}, as requested: {progress.stop_reason}. Nothing is left to"
        f" train; to train further, set {raised}, or checkpoint.continue_stopped=true"
    )


class StopConsensus:
    """Requests to stop and preemption signals, agreed upon by all ranks.

    Args:
        backend: for the collectives.
        progress: keeps a callback's decision to stop, so that it is part of every checkpoint from then on.
        history: `stop_reason` and `preempted` are set once the ranks agree.
        goal: a run that has reached it is not preempted.

    Attributes:
        next_check: the step at which the ranks next ask each other about signals, about a second from
            the last time; at steps 1, 2, 4, ... until an interval was timed.
    """

    def __init__(self, backend: Backend, progress: Progress, history: History, goal: Goal) -> None:
        self.backend, self.progress, self.history, self.goal = backend, progress, history, goal
        self._request: tuple[str, bool] | None = None
        self._steps_per_second: int | None = None
        self.start()

    def start(self, further: bool = False) -> None:
        """Training begins at the current step, unless a callback had stopped the run there.

        Args:
            further: train in any case.
        """
        progress = self.progress
        if further or self.goal.exceeds(progress):
            progress.stop_reason = progress.stop_epochs = progress.stop_steps = None
        self.history.stop_reason = progress.stop_reason
        self._started_at, self.next_check = progress.step, progress.step + 1

    def request(self, reason: str, final: bool) -> None:
        """Ask for a stop from this rank. The first reason counts.

        Args:
            final: a resumed run stays stopped.
        """
        self._request = self._request or (reason, final)

    @property
    def wishes(self) -> tuple[bool, bool]:
        """(stop, go): whether this rank asks for a stop, and whether it was preempted."""
        return self._request is not None, received_signal() is not None

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
            requests = self.backend.gather_objects(self._request)
            history.stop_reason, final = next(request for request in requests if request)
            if final:
                self._keep(history.stop_reason)
        if go and history.stop_reason is None and not self.goal.reached(self.progress):
            names = self.backend.gather_objects(received_signal())
            history.stop_reason = history.preempted = next(name for name in names if name)

    def _keep(self, reason: str | None) -> None:
        """Make the decision to stop a part of the saved state."""
        progress, goal = self.progress, self.goal
        progress.stop_reason, progress.stop_steps = reason, goal.step
        progress.stop_epochs = None if goal.epoch == math.inf else int(goal.epoch)
