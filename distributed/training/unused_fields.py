"""Warn of what a run was given and does not use."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from distributed.config import DistributedConfig
from distributed.interfaces.task import Task

__all__ = ["find_unused", "warn_of_unused"]

logger = logging.getLogger("distributed")


def warn_of_unused(config: DistributedConfig, task: Task) -> None:
    """Log a warning for each field and argument that has no effect in the run."""
    for name, reason in find_unused(config, task):
        logger.warning("%s has no effect: %s", name, reason)


def find_unused(config: DistributedConfig, task: Task) -> Iterator[tuple[str, str]]:
    """(field or argument; why it has no effect) of what was set by the user; defaults are not."""
    for names, reason in _without_effect(config, task):
        yield from ((name, reason) for name in names if config.origin(name) != "default")
    if not task.val_data:
        reason = "it is computed on validation data, and there is none: give fit(train_loader, val_loader)"
        given = {"metrics": task.metrics, "validation_step": task.validation_step}
        yield from ((name, reason) for name, value in given.items() if value)


def _without_effect(config: DistributedConfig, task: Task) -> Iterator[tuple[tuple[str, ...], str]]:
    """(fields, why they have no effect if they are set)"""
    if task.optimizer is not None:
        yield (
            ("weight_decay", "momentum"),
            "the optimizer given has its own: set it there, e.g. optimizer=functools.partial(torch.optim.SGD,"
            " weight_decay=0.1)",
        )
    elif config.optimizer != "sgd":
        yield ("momentum",), f"optimizer={config.optimizer} has none: set optimizer=sgd"
    if task.scheduler is not None:
        yield (
            ("warmup_steps", "min_lr_ratio"),
            "the scheduler given has its own: leave it out, or set it there",
        )
    else:
        yield (
            ("scheduler_interval",),
            f"the schedule '{config.scheduler}' is stepped after each optimizer step",
        )
        if config.scheduler == "constant":
            yield ("min_lr_ratio",), "the learning rate stays constant: set scheduler to linear or cosine"
    if config.checkpoint_dir is None:
        yield (
            tuple(f"checkpoint.{name}" for name in ("every_n_steps", "keep_last", "metric")),
            "nothing is saved: set checkpoint_dir",
        )
