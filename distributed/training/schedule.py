"""Schedule: the learning-rate scheduler of a run and the event that steps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.checkpoint.optimizer_state import same_kind
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.system.strict_json import shown
from distributed.training.optimizers import build_scheduler


class Schedule:
    """A scheduler, stepped after every optimizer step, every epoch or every validation (C7).

    Attributes:
        scheduler: an object with `step`, `state_dict` and `load_state_dict`; None keeps the rate constant.
        interval: ``step``, ``epoch`` or ``validation``.
    """

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.interval = "step"
        self._is_planned = False

    def build(self, given: Any, optimizer: Any, config: DistributedConfig, total_steps: int | None) -> None:
        """Build the scheduler from the user's object or factory, or from the configuration.

        Raises:
            UserError: it drives another optimizer, or a decay has no known end.
        """
        self.scheduler, self.interval = build_scheduler(given, optimizer, config, total_steps)
        self._is_planned = given is None and config.scheduler != "constant" and config.max_steps is None
        if total_steps is not None:
            _check_end(self.scheduler, self.interval, total_steps, config.epochs)

    @property
    def has_end(self) -> bool:
        """The rates depend on the number of steps of the run."""
        return self._is_planned or hasattr(self.scheduler, "total_steps")

    def after_step(self) -> None:
        """Step a per-step scheduler. Not called for a skipped optimizer step."""
        if self.scheduler is not None and self.interval == "step":
            self.scheduler.step()

    def after_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step a per-epoch scheduler, or one that watches the validation loss."""
        if self.interval == "validation":
            self.scheduler.step(metrics.get("val_loss", metrics["train_loss"]))
        elif self.interval == "epoch" and self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> Any:
        """The scheduler's state, None without one."""
        return None if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` returned; nothing happens without a scheduler or without a state.

        Raises:
            UserError: it is no state of a scheduler of this kind.
        """
        if self.scheduler is None or state is None:
            return
        _check_state(self.scheduler, state)
        self.scheduler.load_state_dict(state)


def _check_state(scheduler: Any, saved: Any) -> None:
    """Torch's schedulers set whatever attributes they get, also those that are methods or the optimizer."""
    own = scheduler.state_dict()
    if not isinstance(own, dict):
        return
    wrong = "" if isinstance(saved, dict) else f"{shown(saved)} is no mapping"
    for name, value in saved.items() if isinstance(saved, dict) else ():
        if name not in own and (name == "optimizer" or callable(getattr(scheduler, str(name), None))):
            wrong = f"it would replace {name}"
        elif name in own and not same_kind(own[name], value):
            wrong = f"{name} is {shown(value)}, and here {shown(own[name])}"
    if wrong:
        raise UserError(
            f"the checkpoint has the state of another scheduler: {wrong}",
            field="scheduler",
            got=type(scheduler).__name__,
            remedy="Use the scheduler that was saved, or resume from an older checkpoint",
        )


def _check_end(scheduler: Any, interval: str, total_steps: int, epochs: int | None) -> None:
    """Raise a UserError for a schedule of known length, as OneCycleLR, that the run does not fit."""
    planned = getattr(scheduler, "total_steps", None)
    if not isinstance(planned, int) or getattr(scheduler, "last_epoch", None) != 0:
        return
    name = f"{type(scheduler).__name__}(total_steps={planned})"
    if interval == "step" and planned < total_steps:
        raise UserError(
            f"the schedule ends after {planned} steps and the run takes {total_steps}",
            field="scheduler",
            got=name,
            allowed=f"total_steps of at least {total_steps}",
            remedy=f"Set total_steps={total_steps}; a step is an optimizer step over all ranks, so that"
            " accumulation and ranks lower their number",
        )
    if interval == "epoch" and epochs is not None and planned == total_steps > epochs:
        raise UserError(
            "the schedule has one step per optimizer step, and it would be stepped after each of"
            f" {epochs} epochs",
            field="scheduler_interval",
            got=f"{interval}, with {name}",
            allowed=f"step, for a schedule of {planned} steps",
            remedy="Set scheduler_interval=step",
        )
