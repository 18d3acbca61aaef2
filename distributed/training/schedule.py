"""Schedule: the learning-rate scheduler of a run and the event that steps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.checkpoint.optimizer_state import same_kind
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.metric import larger_is_better, metric_name
from distributed.system.strict_json import shown
from distributed.training.optimizers import arguments_of, build_scheduler
from distributed.training.schedule_checks import Extent, check_schedule


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
        self._metric: str | None = None
        self._arguments: list[str] = []

    def build(self, given: Any, optimizer: Any, config: DistributedConfig, run: Extent) -> None:
        """Build the scheduler from the user's object or factory, or from the configuration.

        Raises:
            UserError: it drives another optimizer, a decay has no known end, or it does not fit the run.
        """
        if given is None and config.scheduler != "constant" and run.begun:
            raise _refuse_continued(config, run)
        self.scheduler, self.interval = build_scheduler(given, optimizer, config, run.steps)
        self._metric = config.scheduler_metric
        self._is_planned = given is None and config.scheduler != "constant" and config.max_steps is None
        if given is None:
            return
        self._arguments = arguments_of(self.scheduler)
        if self._mode == "max" and not (run.has_metrics or self._metric):
            raise _refuse_metric(self.scheduler, "no validation data is given")
        is_chosen = config.origin("scheduler_interval") != "default" or hasattr(self.scheduler, "step_update")
        check_schedule(self.scheduler, optimizer, self.interval, is_chosen, run)

    @property
    def has_end(self) -> bool:
        """The rates depend on the number of steps of the run."""
        return self._is_planned or hasattr(self.scheduler, "total_steps")

    def after_step(self, step: int) -> None:
        """Step a per-step scheduler. Not called for a skipped optimizer step.

        Args:
            step: number of optimizer steps taken.
        """
        if hasattr(self.scheduler, "step_update"):  # of timm's, which have both
            self.scheduler.step_update(step)
        if self.scheduler is not None and self.interval == "step":
            self._step(step, {})

    def after_epoch(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Step a per-epoch scheduler, or one that watches a metric.

        Args:
            metrics: of the epoch.
            epoch: number of epochs completed.

        Raises:
            UserError: the metric that it watches was not reported.
        """
        if self.scheduler is not None and self.interval != "step":
            self._step(epoch, metrics)

    def _step(self, number: int, metrics: Mapping[str, float]) -> None:
        values = (self._watched(metrics) if name == "metric" else number for name in self._arguments)
        self.scheduler.step(*values)

    @property
    def _mode(self) -> str | None:
        """``max`` if it waits for an increase; of timm's, the one that they wrap knows."""
        inner = getattr(self.scheduler, "lr_scheduler", None)
        return getattr(self.scheduler, "mode", None) or getattr(inner, "mode", None)

    def _watched(self, metrics: Mapping[str, float]) -> float:
        if self._metric is not None:
            return metrics[metric_name(self._metric, metrics, "scheduler_metric") or ""]
        if self._mode != "max":
            return metrics.get("val_loss", metrics["train_loss"])
        found = [n for n in metrics if n.startswith("val_") and larger_is_better("auto", n)]
        if len(found) != 1:
            raise _refuse_metric(self.scheduler, f"{', '.join(found) or 'only losses'} could be meant")
        return metrics[found[0]]

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


def _refuse_metric(scheduler: Any, reason: str) -> UserError:
    return UserError(
        f"the scheduler waits for a metric to increase (mode='max'), and {reason}",
        field="scheduler_metric",
        got=None,
        allowed="the name of a metric of an epoch, such as val_accuracy",
        remedy=f"Set scheduler_metric, or give {type(scheduler).__name__} mode='min' to follow the loss",
    )


def _refuse_continued(config: DistributedConfig, run: Extent) -> UserError:
    return UserError(
        f"the schedule '{config.scheduler}' ended with the earlier fit, after {run.begun} steps, and this fit"
        " would begin in the middle of a longer one",
        field="scheduler",
        got=config.scheduler,
        allowed="constant in a second fit, or a scheduler of your own, which goes on",
        remedy=f"Call fit once with epochs={run.epochs}"
        if run.epochs is not None and not run.is_cut
        else f"Call fit once with max_steps={run.steps}",
    )
