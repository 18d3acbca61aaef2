"""Whether the training of a task depends on the size of its micro-batches, found without values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from distributed.interfaces.task import Task
from distributed.operations.planning.apart import without_values
from distributed.operations.planning.private_copies import empty_as, private_copies
from distributed.operations.planning.recorder import explained, resized_batch
from distributed.training.model_outputs import call_by_name, logits_of
from distributed.training.model_traits import with_statistics
from distributed.training.module_modes import ModuleModes
from distributed.training.objective import Objective, align_classes, split_batch

__all__ = ["OTHER", "compares_samples", "effect_of_size"]

OTHER = "another training: "
"""With this begins the effect of a size that changes the training of every task of its kind."""

_logger = logging.getLogger("distributed")
_SIZES = (11, 23, 47)
"""Samples of the micro-batches that are compared. Primes, of which no constant dimension is a multiple."""
_FEW = 2
"""Dimensions that grow with the samples, from which on a tensor compares them with each other."""


def compares_samples(task: Task, model: nn.Module, batch: Any) -> bool | None:
    """Whether the step compares the samples of a micro-batch with each other, as losses with in-batch
    negatives do: a result with a gradient has a row and a column for each sample, at three sizes. None where
    that is not known.

    Args:
        task, model, batch: as of `effect_of_size`.
    """
    try:
        return _grows_twice([_shapes(task, model, batch, size) for size in _SIZES])
    except Exception:  # noqa: BLE001 - the user's code may raise anything where tensors have no values
        return None


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
        return f"{OTHER}{layer} computes statistics over a micro-batch"
    try:
        compares = _grows_twice([_shapes(task, model, batch, size) for size in _SIZES])
        if compares:
            return f"{OTHER}the loss compares the samples of a micro-batch with each other"
        found = _effect_in(task, model, batch, _SIZES[0])
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything where tensors have no values
        line = str(getattr(error, "message", error)).partition("\n")[0]
        return f"not checked whether the training is the same: {type(error).__name__}: {line[:200]}"
    if compares is None:
        return "not checked whether the training is the same: its operations depend on the number of samples"
    return found


def _grows_twice(shapes: list[list[torch.Size]]) -> bool | None:
    """Whether two dimensions of a result grow with the number of samples; None where the steps of different
    sizes have different operations."""
    if len({tuple(map(len, each)) for each in shapes}) > 1:
        return None
    return any(
        sum(a < b < c for a, b, c in zip(*each, strict=True)) >= _FEW for each in zip(*shapes, strict=True)
    )


def _shapes(task: Task, model: nn.Module, batch: Any, size: int) -> list[torch.Size]:
    """Those of the results with a gradient, in the order of the operations."""
    found = _Shapes()
    with _without_values(task, model) as (fake, loss_fn, training_step), found:
        given = resized_batch(batch, size, "cpu")
        if training_step is not None:
            training_step(fake, given)
        elif isinstance(given, Mapping):
            call_by_name(fake, given)
        else:
            inputs, target = split_batch(given)
            output = logits_of(fake(*inputs))
            if loss_fn is None or isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
                output, target = align_classes(output, target)
            (loss_fn or nn.functional.cross_entropy)(output, target)
    return found.shapes


def _effect_in(task: Task, model: nn.Module, batch: Any, size: int) -> str:
    """Effects of a micro-batch of one size beside those of `compares_samples`."""
    with _without_values(task, model) as (fake, loss_fn, training_step), _without_warnings():
        objective = Objective(loss_fn, training_step, warns=True, compares_samples=False)
        versions = _versions(fake)
        given = resized_batch(batch, size, "cpu")
        counted = objective.counted and objective.weighs_means(given)
        (objective if counted else objective.mean)(fake, given, size)
        changed = [name for name, version in _versions(fake).items() if versions.get(name) != version]
    if changed:
        return f"{OTHER}the forward pass changes the buffer '{changed[0]}' once per micro-batch"
    if objective.other_count is not None:
        return (
            "another training if the number of targets of a sample varies: the loss is weighted by samples,"
            " and computed from targets"
        )
    return ""


@contextmanager
def _without_values(task: Task, model: nn.Module) -> Iterator[tuple[nn.Module, Any, Any]]:
    """The model, in training, the loss and the training step, as copies, under fake tensors."""
    mode, memo = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Any]()
    with mode, explained():
        fake = without_values(model, "cpu", memo)
        with unset_fake_temporarily():
            given = private_copies((task.loss_fn, task.training_step), memo, partial(_fake, mode))
        ModuleModes().set_training(fake, True)
        yield fake, *given


class _Shapes(TorchFunctionMode):
    """Records the shapes of results with a gradient. Masks, which have none, may be of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            self.shapes.append(result.shape)
        return result


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    with mode:
        return empty_as(tensor, "cpu")


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
