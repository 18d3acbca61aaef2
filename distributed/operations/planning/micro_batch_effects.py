"""Whether the training of a task depends on the size of its micro-batches, found without values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.operations.planning.apart import without_values
from distributed.operations.planning.private_copies import private_copies
from distributed.operations.planning.recorder import explained, resized_batch
from distributed.training.model_traits import with_statistics
from distributed.training.module_modes import ModuleModes
from distributed.training.objective import Objective

__all__ = ["effect_of_size"]

_logger = logging.getLogger("distributed")
_SIZES = (11, 23)
"""Samples of two micro-batches: scores that are square with both compare the samples with each other."""


def effect_of_size(task: Task, model: nn.Module, batch: Any) -> str:
    """Why micro-batches of another size would change the training, or why that is not known; empty where they
    do not change it. These are the checks of ``batch_size=auto``, as far as they need no values.

    Args:
        task: with loss and training step, of which copies are called.
        model: whole, with values or without.
        batch: first samples, as the data loader yields them.
    """
    layer = with_statistics(model)
    if layer is not None:
        return f"another training: {layer} computes statistics over a micro-batch"
    try:
        found = [_effect_in(task, model, batch, size) for size in _SIZES]
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything where tensors have no values
        line = str(getattr(error, "message", error)).partition("\n")[0]
        return f"not checked whether the training is the same: {type(error).__name__}: {line[:200]}"
    # A loss over as many classes as samples has square scores with one of the sizes.
    return found[0] if found[0] and found[1] else ""


def _effect_in(task: Task, model: nn.Module, batch: Any, size: int) -> str:
    """The same for one size."""
    mode, memo = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Any]()
    with mode, explained(), _without_warnings():
        fake = without_values(model, "cpu", memo)
        with unset_fake_temporarily():
            given = private_copies((task.loss_fn, task.training_step), memo, partial(_fake, mode))
        objective = Objective(*given, warns=True, is_chosen=True)
        ModuleModes().set_training(fake, True)
        versions = _versions(fake)
        sized = resized_batch(batch, size, "cpu")
        try:
            counted = objective.counted and objective.weighs_means(sized)
            (objective if counted else objective.mean)(fake, sized, size)
        except UserError as error:
            if (error.field, error.got) != ("batch_size", "auto"):
                raise
            return "another training: the loss compares the samples of a micro-batch with each other"
        changed = [name for name, version in _versions(fake).items() if versions.get(name) != version]
    if changed:
        return f"another training: the forward pass changes the buffer '{changed[0]}' once per micro-batch"
    if objective.other_count is not None:
        return (
            "another training if the number of targets of a sample varies: the loss is weighted by samples,"
            " and computed from targets"
        )
    return ""


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The objective's warning is returned here."""
    before = _logger.disabled
    _logger.disabled = True
    try:
        yield
    finally:
        _logger.disabled = before


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Buffer -> its object and the number of writes to it, without statistics of norms."""
    norms = nn.modules.batchnorm._NormBase
    return {
        f"{prefix}.{name}".lstrip("."): (id(tensor), tensor._version)
        for prefix, module in model.named_modules()
        if not isinstance(module, norms)
        for name, tensor in module._buffers.items()
        if tensor is not None
    }
