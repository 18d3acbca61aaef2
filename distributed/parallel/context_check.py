"""Compare, before the first step, what a model computes of slices with what it computes of whole sequences.

Attention that sees its own slice alone, positions that restart in each slice, or a loss that is no sum
over tokens would otherwise train something else without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from distributed.checkpoint.dtensor import local_part, whole
from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.parallel.context_axis import ContextAxis
from distributed.parallel.cut_check import room_for_rounding, times_rounding
from distributed.parallel.sample_batch import forward_of, is_short, undisturbed
from distributed.training.batch_transfer import move
from distributed.training.model_outputs import logits_of
from distributed.training.objective import Objective

__all__ = ["check_objective", "check_slices", "check_whole_model"]

_FIELD = "parallel.context"
_SAMPLES = 2
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_FLIPPED = 0.01
"""Share of the counted tokens whose prediction rounding may change."""
Terms = dict[str, tuple[float, float]]


class _Evaluates(Protocol):
    """What is needed of a backend."""

    module: nn.Module

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]: ...
    def to_device(self, batch: Any) -> Any: ...
    def all_reduce(self, values: list[float]) -> list[float]: ...


@dataclass
class _Whole:
    """A model that is whole on every rank, and not on its device yet."""

    module: nn.Module
    objective: Objective
    all_reduce: Callable[[list[float]], list[float]]

    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Any]:
        return self.objective.evaluate(self.module, batch, num_samples)

    def to_device(self, batch: Any) -> Any:
        return move(batch, _device_of(self.module))


def check_whole_model(
    model: nn.Module, task: Task, axis: ContextAxis, all_reduce: Callable[[list[float]], list[float]]
) -> None:
    """As `check_slices`, with the first samples of the data and before stages of a pipeline divide the model,
    of which few ranks see an output. Collective over the world.

    Args:
        model: whole, and equal on all ranks.
        all_reduce: adds numbers over all ranks.

    Raises:
        UserError: as `check_objective` and `check_slices`.
    """
    given = task.loss_fn, task.training_step, task.metrics, task.validation_step
    objective = Objective(*given, _device_of(model))
    check_objective(task, objective)
    check_slices(
        _Whole(model, objective, all_reduce), axis, forward_of(task, model, field="parallel.pipeline")[1]
    )


def _device_of(model: nn.Module) -> str:
    return str(next(model.parameters()).device)


def check_objective(task: Task, objective: Objective) -> None:
    """Refuse losses that are not a sum over the tokens of a slice.

    Raises:
        UserError: a function has to see whole sequences, or the loss has no count of tokens.
    """
    for field in ("training_step", "validation_step"):
        if getattr(task, field) is not None:
            raise UserError(
                "ranks that hold slices of a sequence call the model and the loss themselves",
                field=field,
                got="a function",
                allowed="None",
                remedy="Give batches (inputs..., target), and a loss_fn that returns (sum, count of tokens)",
            )
    if not objective.counted:
        raise UserError(
            "the loss is a mean over samples, and a rank has a slice of each sample",
            field="loss_fn",
            got=type(task.loss_fn).__name__,
            allowed="cross-entropy, or a function that returns (sum, count of tokens)",
            remedy="Return (sum, count), such as lambda output, target: (F.mse_loss(output, target,"
            " reduction='sum'), target.numel())",
        )


def check_slices(backend: _Evaluates, axis: ContextAxis, batch: Any) -> None:
    """Evaluate the first two samples of `batch` whole and in slices, and compare. Collective over the world.

    Parameters that are zero, such as those of a layer whose output does not count yet, hold small numbers
    meanwhile.

    Args:
        backend: with the model.
        axis: the ranks that hold slices.
        batch: (inputs..., target), whole.

    Raises:
        UserError: outputs, loss or a metric differ.
    """
    rows = _few_rows(backend.module, axis, batch)
    number = len(rows[-1])
    foreign = _Foreign()
    with undisturbed(backend.module), _zeros_filled(backend.module):
        terms, output = _evaluated(backend, rows, number)
        layout = axis.layout(rows[0].shape[1])
        with axis.over_slices(training=False), foreign:
            try:
                sliced, part = _evaluated(backend, axis.cut(rows), number)
            except ValueError as error:
                raise _cannot(error) from error
    wrong = [float(foreign.found is not None), 0.0, 0.0]
    room = room_for_rounding(backend.module)
    if output.dim() < 2 or output.shape[1] != rows[0].shape[1]:
        wrong[1] = 1.0
    else:
        wrong[1] = float(times_rounding([axis.slice_of(output, layout)], [part], room) > 1.0)
    different = _different_terms(terms, _added(sliced, axis.group, output.device), room)
    wrong[2] = float(different is not None)
    called, computed, counted = backend.all_reduce(wrong)
    if called or computed:
        _refuse_model(axis.size, foreign.found, output)
    if counted:
        _refuse_terms(axis.size, different or "the loss")


def _few_rows(model: nn.Module, axis: ContextAxis, batch: Any) -> Any:
    """Two samples of `batch`, cut short where a forward pass of them takes long."""
    axis.cut(batch)  # raises for what cannot be cut
    rows = tree_map_only(Tensor, lambda part: part[:_SAMPLES], batch)
    while not is_short(model, rows):
        half = rows[0].shape[1] // 2
        try:
            axis.layout(half)
        except UserError:
            break
        rows = tree_map_only(Tensor, partial(_first_positions, half), rows)
    return rows


def _first_positions(number: int, part: Tensor) -> Tensor:
    return part[:, :number]


def _evaluated(backend: _Evaluates, batch: Any, number: int) -> tuple[Terms, Tensor]:
    """``{name: (sum, count)}``, and the model's output in float64."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(whole(logits_of(output)).double())

    handle = backend.module.register_forward_hook(keep)
    try:
        found = backend.evaluate(backend.to_device(batch), number)
    finally:
        handle.remove()
    return {name: (float(total), float(count)) for name, (total, count) in found.items()}, outputs[-1]


def _added(terms: Terms, group: Any, device: torch.device) -> Terms:
    """The sums and counts of all slices. Collective."""
    flat = torch.tensor(
        [value for pair in terms.values() for value in pair], dtype=torch.float64, device=device
    )
    dist.all_reduce(flat, group=group)
    values = flat.tolist()
    return dict(zip(terms, zip(values[::2], values[1::2], strict=True), strict=True))


def _different_terms(terms: Terms, added: Mapping[str, tuple[float, float]], room: float) -> str | None:
    """The first loss or metric that slices do not add up to."""
    for name, (total, count) in terms.items():
        sliced, counted = added[name]
        # A count of tokens is a whole number, and one of class weights is not.
        if abs(counted - count) > room * max(abs(count), 1.0):
            return name
        allowed = room * max(abs(total), 1.0) if room < 1e-5 or name == "loss" else _FLIPPED * max(count, 1.0)
        if abs(sliced - total) > allowed:
            return name
    return None


class _Foreign(TorchFunctionMode):
    """Notes the name of an attention function of torch that a model calls itself."""

    found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTION:
            self.found = func.__name__
        return func(*args, **(kwargs or {}))


@contextmanager
def _zeros_filled(model: nn.Module) -> Iterator[None]:
    """Within the block, parameters that are zero hold small numbers, equal on ranks with the same part."""
    zeros = [local_part(p.data) for p in model.parameters() if not local_part(p.data).any()]
    generator = torch.Generator().manual_seed(0)
    for part in zeros:
        part.copy_(torch.randn(part.shape, generator=generator) * 0.02)
    try:
        yield
    finally:
        for part in zeros:
            part.zero_()


def _cannot(error: ValueError) -> UserError:
    return UserError(
        f"the model cannot be computed from slices of sequences: {error}",
        field=_FIELD,
        allowed="1",
        remedy="Change the sequences or the model so, or use parallel.context=1",
    )


def _refuse_model(size: int, called: str | None, output: Tensor) -> NoReturn:
    why = f": it calls {called} itself, which sees one slice" if called else ""
    raise UserError(
        f"the model computes something else when {size} ranks hold slices of its sequences{why}",
        field=_FIELD,
        got=f"{size}, with an output {tuple(output.shape)}",
        allowed="models with an output (batch, length, ...) whose positions are mixed by attention that can"
        " be replaced alone, and that know their positions in a slice",
        remedy="Use a model of transformers, modules with a method set_context_group, or parallel.context=1",
    )


def _refuse_terms(size: int, name: str) -> NoReturn:
    raise UserError(
        f"'{name}' of slices does not add up to that of whole sequences: it is no sum over tokens",
        field="loss_fn" if name == "loss" else "metrics",
        got=f"{size} slices of each sequence",
        allowed="(sum over tokens, number of tokens)",
        remedy="Return both as sums over the positions of the target, or use parallel.context=1",
    )
