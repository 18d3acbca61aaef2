"""A forward pass with the first samples of the training data, for what is read from a model before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distributed.data import Source
from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.parallel.context_axis import ContextAxis
from distributed.training.batch_transfer import move
from distributed.training.forward_state import Buffers
from distributed.training.seeding import isolated_rng

__all__ = ["first_samples", "forward_of", "is_short", "undisturbed"]

_WITHOUT_SAMPLES = {
    "parallel.tensor": "name modules in parallel.tensor_plan, such as {'layers.*.up': colwise,"
    " 'layers.*.down': rowwise}",
    "parallel.pipeline": "use parallel.tensor or parallel.data",
}
"""Field -> what does without samples."""
_OPERATIONS = 1e13
_PLAIN = (type(None), bool, int, float, str, tuple)


def forward_of(
    task: Task,
    model: nn.Module,
    number: int = 2,
    device: str | None = None,
    field: str = "parallel.tensor",
    slices: ContextAxis | None = None,
    repeated: bool = False,
) -> tuple[Callable[[], Any], Any]:
    """(what calls `model` with the first samples as a training step does and returns its output, these
    samples)

    Args:
        number: of samples; fewer if there are no more.
        device: of the samples; None for that of the first parameter at the time of the call.
        field: of the configuration that divides the model, for errors.
        slices: the ranks that hold slices of each sequence. The samples are this rank's slices then, and the
            call is collective over these ranks.
        repeated: take the first sample `number` times.

    Raises:
        UserError: the data is a stream, of which a first sample would be missing afterwards.
    """
    source = task.train_data
    if source is None or not source.is_map:
        raise UserError(
            f"how {field} divides the model is read from a forward pass with the first samples, and the data"
            " is a stream, of which they would be missing afterwards",
            field=field,
            got="an iterable dataset",
            allowed="datasets with __getitem__ and __len__",
            remedy=f"Give such a dataset, or {_WITHOUT_SAMPLES[field]}",
        )
    batch = first_samples(source, number, repeated)
    batch = move(batch, device or str(next(model.parameters()).device))
    if slices is None:
        return partial(_call, task, model, batch, device), batch
    own = slices.cut(batch)
    return partial(_call_over, slices, task, model, own, device), own


def first_samples(source: Source, number: int, repeated: bool = False) -> Any:
    """A batch of the first samples of a map-style dataset, on the host.

    Args:
        number: of samples; fewer if there are no more.
        repeated: take the first sample `number` times.
    """
    different = 1 if repeated else min(number, source.length or number)
    with isolated_rng():
        samples = [source.dataset[index] for index in range(different)]
        # Copies, because a collate function may change its samples.
        return source.collate_fn([deepcopy(samples[0]) for _ in range(number)] if repeated else samples)


def is_short(model: nn.Module, batch: Any) -> bool:
    """Whether a forward pass is a matter of seconds on a CPU: two operations for each parameter and element
    of the batch, as in a transformer over tokens."""
    elements = max((t.numel() for t in tree_leaves(batch) if isinstance(t, Tensor)), default=0)
    return 2 * elements * sum(p.numel() for p in model.parameters()) < _OPERATIONS


def _call(task: Task, model: nn.Module, batch: Any, device: str | None = None) -> Any:
    # The model may have moved since the samples were read.
    batch = batch if device is not None else move(batch, str(next(model.parameters()).device))
    if task.training_step is not None:
        return task.training_step(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch[:-1])


def _call_over(slices: ContextAxis, task: Task, model: nn.Module, batch: Any, device: str | None) -> Any:
    with slices.over_slices(training=False):
        return _call(task, model, batch, device)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients, after which modes, buffers, plain attributes such as counters, and random
    numbers are as before."""
    plain = {m: {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)} for m in model.modules()}
    buffers, fast = Buffers(model), torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it reads weights without calling the layers
        model.eval()
        with isolated_rng(), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, values in plain.items():
            vars(module).update(values)
        buffers.restore()
