"""Goal: the epoch and step at which one `fit` ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.task import Progress

__all__ = ["Goal"]


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

    def reached(self, progress: Progress) -> bool:
        """Whether all epochs or steps are complete."""
        return progress.epoch >= self.epoch or (self.step is not None and progress.step >= self.step)

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps of the whole run up to the goal, for decaying schedules; None when unknown."""
        by_epochs = None
        if steps_per_epoch is not None and self.epoch != math.inf:
            by_epochs = int(self.epoch) * steps_per_epoch
        if self.step is None or by_epochs is None:
            return by_epochs if self.step is None else self.step
        return min(by_epochs, self.step)
