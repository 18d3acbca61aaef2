"""ContextAxis: the ranks that hold slices of each sequence, and what a window is to each of them.

The feed gives all of them the same window. Each cuts its slice out of every input and target, the model's
attention exchanges keys and values, and losses, counts and gradients of the slices are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.interfaces.plan import RunPlan
from distributed.registry.catalog import load_target
from distributed.training.seeding import numbers_of_rank

__all__ = ["ContextAttention", "ContextAxis", "attention_of", "draws_numbers"]

_FIELD = "parallel.context"


class ContextAttention(Protocol):
    """How the attention of a model computes over slices of sequences.

    What it cannot compute raises a ValueError, with ``got``, ``allowed`` and ``remedy`` where it has them.
    """

    def layout(self, length: int) -> str:
        """How a sequence of `length` is cut: ``contiguous``, or ``zigzag``, where rank i of n has the chunks
        i and 2n - 1 - i of 2n."""

    def attach(self) -> None:
        """Take the model for a run. Outside of `over` it computes whole sequences."""

    def over(self, group: Any) -> AbstractContextManager[None]:
        """Context in which the model computes slices of sequences that the ranks of `group` hold."""

    def state(self) -> Any:
        """What the last forward pass has left for layers that backward computes again."""

    def restore(self, state: Any) -> None:
        """Return to the `state` after another forward pass."""

    def release(self) -> None:
        """Leave the model as it came."""


def attention_of(model: nn.Module, plan: RunPlan) -> ContextAttention:
    """The attention of `model` for ranks that hold slices of sequences.

    Raises:
        UserError: it cannot be computed over slices.
    """
    _check_layers(model)
    dims, method = plan.dims, plan.config.parallel.context_attention
    try:
        find = load_target(plan.spec.context_attention)
        found: ContextAttention = find(model, method, dims.context, dims.tensor)
    except ValueError as error:
        raise _explained(error, "parallel.context_attention") from error
    return found


class ContextAxis:
    """The ranks along the axis ``context``, and this rank's slices.

    Args:
        attention: of the model.
        group: process group of the ranks.
        index: this rank among them.
        size: their number.
        draws: the model draws random numbers in training.
    """

    def __init__(
        self, attention: ContextAttention, group: Any, index: int, size: int, draws: bool = False
    ) -> None:
        self._attention, self._draws = attention, draws
        self.group, self.index, self.size = group, index, size
        attention.attach()

    def cut_window(self, window: Window) -> Window:
        """`window` with this rank's slice of each micro-batch.

        Raises:
            UserError: as `cut`.
        """
        sliced = [micro._replace(batch=self.cut(micro.batch)) for micro in window.micro_batches]
        return window._replace(micro_batches=sliced)

    def cut(self, batch: Any) -> Any:
        """This rank's slice of a batch ``(inputs..., target)`` of tensors (batch, length, ...).

        Raises:
            UserError: a part has no sequence, or the ranks do not divide its length.
        """
        parts = tree_leaves(batch)
        if isinstance(batch, Mapping) or not all(isinstance(part, Tensor) for part in parts):
            _refuse_batch(batch)
        lengths = {part.shape[1] if part.dim() > 1 else None for part in parts}
        length = next(iter(lengths))
        if len(lengths) > 1 or length is None:
            _refuse_parts(parts)
        layout = self.layout(length)
        return tree_map_only(Tensor, lambda part: self.slice_of(part, layout), batch)

    def layout(self, length: int) -> str:
        """How sequences of `length` are cut.

        Raises:
            UserError: the ranks do not divide them; names lengths that they do.
        """
        try:
            return self._attention.layout(length)
        except ValueError as error:
            raise _explained(error, _FIELD) from error

    def slice_of(self, part: Tensor, layout: str) -> Tensor:
        """This rank's slice of dimension 1 of `part`."""
        if layout == "zigzag":
            chunks = part.chunk(2 * self.size, dim=1)
            return torch.cat([chunks[self.index], chunks[2 * self.size - 1 - self.index]], dim=1)
        return part.chunk(self.size, dim=1)[self.index]

    @contextmanager
    def over_slices(self, training: bool) -> Iterator[None]:
        """Within the block, the model computes slices of sequences, forward and backward."""
        own = numbers_of_rank(self.index) if training and self._draws else nullcontext()
        with self._attention.over(self.group), own:
            yield

    def state(self) -> Any:
        """What the last forward pass has left for layers that backward computes again."""
        return self._attention.state()

    def restore(self, state: Any) -> None:
        """Return to the `state` after another forward pass."""
        self._attention.restore(state)

    def release(self) -> None:
        """Leave the model as it came."""
        self._attention.release()


def draws_numbers(model: nn.Module) -> bool:
    """Whether a module of `model` has dropout, as a layer or as a rate among its attributes."""
    for module in model.modules():
        layer = isinstance(module, nn.modules.dropout._DropoutNd)
        rates = [value for name, value in vars(module).items() if layer or "drop" in name]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False


def _check_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"'{name}' takes statistics over all positions, and a rank has a slice of them",
                field=_FIELD,
                got=type(module).__name__,
                allowed="layers that compute each position or sample by itself, beside attention",
                remedy="Use LayerNorm or RMSNorm, or parallel.context=1",
            )


def _explained(error: Exception, field: str) -> UserError:
    """What the attention refuses, as an error of the configuration."""
    message = getattr(error, "message", str(error))
    return UserError(
        message,
        field=field,
        got=getattr(error, "got", None),
        allowed=getattr(error, "allowed", None),
        remedy=getattr(error, "remedy", None),
    )


def _refuse_batch(batch: Any) -> NoReturn:
    if not isinstance(batch, Mapping):
        raise UserError(
            "only tensors can be cut into slices of sequences",
            field="train_loader",
            got=f"a batch of type {type(batch).__name__}",
            allowed="(inputs..., target) of tensors (batch, length, ...)",
            remedy="Convert the batch in the loader's collate_fn",
        )
    raise UserError(
        "a model that gets its batch by name computes the loss itself, and shifts labels across the edges of"
        " slices",
        field="train_loader",
        got=f"a batch of {', '.join(map(str, batch))}",
        allowed="(inputs..., target) of tensors (batch, length, ...)",
        remedy="Return (input_ids, labels) from the dataset, where labels[t] is the token after input_ids[t],"
        " and -100 where there is none",
    )


def _refuse_parts(parts: list[Tensor]) -> NoReturn:
    raise UserError(
        "the parts of a batch are no sequences of one length, so that they cannot be cut into slices",
        field="train_loader",
        got=", ".join(str(tuple(part.shape)) for part in parts),
        allowed="inputs and targets (batch, length, ...) of one length",
        remedy="Give each position a target (-100 where there is none), or use parallel.context=1",
    )
