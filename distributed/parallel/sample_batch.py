"""A forward pass with the first samples of the training data, for what is read from a model before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.training.batch_transfer import move

__all__ = ["forward_of"]

_SAMPLES = 2


def forward_of(task: Task, model: nn.Module, device: str) -> Callable[[], Any]:
    """What calls `model` with two samples as a training step does, and returns its output.

    Raises:
        UserError: the data is a stream, of which a first sample would be missing afterwards.
    """
    source = task.train_data
    if source is None or not source.is_map:
        raise UserError(
            "which layers can be cut is read from a forward pass with the first samples, and the data is a"
            " stream",
            field="parallel.tensor",
            got="a model without a plan",
            remedy="Name modules in parallel.tensor_plan, such as {'layers.*.up': colwise, 'layers.*.down':"
            " rowwise}",
        )
    number = min(_SAMPLES, source.length or _SAMPLES)
    batch = source.collate_fn([source.dataset[index] for index in range(number)])
    where = str(next(model.parameters()).device)
    return lambda: _call(task, model, move(batch, where))


def _call(task: Task, model: nn.Module, batch: Any) -> Any:
    if task.training_step is not None:
        return task.training_step(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch[:-1])
