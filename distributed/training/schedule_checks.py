"""Refuse schedules whose length or interval is not that of the run, by the numbers and rates in them."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distributed.errors import UserError

__all__ = ["Extent", "check_schedule"]


@dataclass(frozen=True)
class Extent:
    """The length of a run.

    Attributes:
        steps: number of its last optimizer step; None if unknown.
        epochs: number of its last epoch, which may be incomplete; None if unknown.
        batches: batches that the loader yields in all epochs, of which a step takes several; None if unknown.
        begun: optimizer steps that an earlier `fit` took.
        is_cut: ``max_steps`` ends the run, so that a schedule may be longer.
        has_metrics: validation reports metrics.
    """

    steps: int | None = None
    epochs: int | None = None
    batches: int | None = None
    begun: int = 0
    is_cut: bool = False
    has_metrics: bool = False


def check_schedule(scheduler: Any, optimizer: Any, interval: str, is_chosen: bool, run: Extent) -> None:
    """Check the schedule of a run.

    Args:
        is_chosen: the user has set ``scheduler_interval``.

    Raises:
        UserError: it ends before or after the run, or has another interval.
    """
    count, planned = run.steps if interval == "step" else run.epochs, getattr(scheduler, "total_steps", None)
    taken = max(0, getattr(scheduler, "last_epoch", 0) - run.begun)  # in a loop of the user's own
    begins = not taken and not run.begun
    if begins and interval == "epoch" and not is_chosen and run.steps != run.epochs:
        _check_interval(scheduler, optimizer, run)
    if begins and planned is None and interval == "step" and run.batches in _numbers(scheduler):
        planned = max(run.batches or 0, count or 0)
    if count is None or not isinstance(planned, int) or planned - taken == count:
        return
    is_longer = planned - taken > count
    if is_longer and run.is_cut:
        return
    part = f", or max_steps={(run.steps or 0) - run.begun} to train a part of it" if is_longer else ""
    length = f"{'total_steps=' if hasattr(scheduler, 'total_steps') else 'its length to '}{count + taken}"
    note = "; a step is an optimizer step over all ranks, so that accumulation and ranks lower their number"
    raise UserError(
        f"the schedule ends after {planned} {interval}s and the run takes {count + taken}",
        field="scheduler",
        got=f"{type(scheduler).__name__} of {planned}",
        allowed=f"a schedule of {count + taken} {interval}s",
        remedy=f"Set {length}{part}{note if interval == 'step' else ''}",
    )


def _check_interval(scheduler: Any, optimizer: Any, run: Extent) -> None:
    """Raise a UserError for a schedule that counts steps where it would be stepped after each epoch."""
    lengths = {n for n in _numbers(scheduler) & {run.steps, run.batches} if n > (run.epochs or 1)}
    if lengths:
        what = f"the schedule has the number {max(lengths)}, of one for each step of the run"
    elif all(float(group["lr"]) == 0.0 for group in optimizer.param_groups):
        what = "the learning rate begins at 0, so that nothing would be learnt in the first epoch"
    elif run.epochs is not None and _only_rises(scheduler, run.epochs):
        what = "the learning rate would rise over the whole run, as in a warm-up that counts steps"
    else:
        return
    often = "epoch" if run.epochs is None else f"of {run.epochs} epochs"
    raise UserError(
        f"{what}, and the schedule would be stepped after each {often}",
        field="scheduler_interval",
        got=f"epoch (the default), with {type(scheduler).__name__}",
        allowed="step or epoch",
        remedy="Set scheduler_interval=step, or scheduler_interval=epoch if it counts epochs",
    )


def _only_rises(scheduler: Any, epochs: int) -> bool:
    """True if each epoch has a higher rate than the one before, and the next one would, too."""
    if not isinstance(scheduler, LRScheduler):
        return False
    optimizer = scheduler.optimizer
    kept = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    try:
        again: Any = copy.deepcopy(scheduler, {**kept, id(optimizer.state): {}})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(epochs):
                before = [float(group["lr"]) for group in again.optimizer.param_groups]
                again.step()
                after = [float(group["lr"]) for group in again.optimizer.param_groups]
                if not all(a < b for a, b in zip(before, after, strict=True)):
                    return False
    except Exception:  # noqa: BLE001 - a scheduler that cannot be copied is not looked at
        return False
    return True


def _numbers(value: Any, depth: int = 5) -> set[int]:
    """Whole numbers by which a schedule is built: its attributes and those of its parts, and what its
    functions were given."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {value}
    parts = _parts(value) if depth and not isinstance(value, Optimizer | type) else []
    return {number for part in parts for number in _numbers(part, depth - 1)}


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        found = inspect.getclosurevars(value)
        outside = [number for number in found.globals.values() if isinstance(number, int)]
        return [*found.nonlocals.values(), *outside, *(value.__defaults__ or ())]
    is_part = hasattr(value, "__dict__") and (hasattr(value, "step") or callable(value))
    return [part for name, part in vars(value).items() if name not in _COUNTERS] if is_part else []


_COUNTERS = ("last_epoch", "_step_count")
