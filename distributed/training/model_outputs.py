"""Read what models and training steps return: a loss, (sum, count), or an object or mapping that has a loss.

Models of transformers, diffusers and peft take a batch by name and return their loss in the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distributed.errors import UserError

__all__ = ["call_by_name", "check_output", "logits_of", "read_loss"]


def call_by_name(model: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """``model(**batch)``.

    Raises:
        UserError: the model does not take one of the names, or does not get one that it needs.
    """
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):
        return model(**batch)
    try:
        signature.bind(**batch)
    except TypeError as error:
        raise UserError(
            f"a batch is passed to the model by name, and {type(model).__name__}.forward does not take it:"
            f" {error}",
            field="train_loader",
            got=f"a batch of {', '.join(map(str, batch))}",
            allowed=f"forward{signature}",
            remedy="Remove or rename columns of the dataset, or give training_step=lambda model, batch: ...",
        ) from None
    return model(**batch)


def read_loss(result: Any, field: str) -> tuple[Tensor, Any]:
    """(loss, its count or None) of what a loss function, a training step or a model returned.

    Args:
        result: a number; (sum, count); (loss, output, ...); or an object or mapping with a loss.
        field: the argument that it came from.

    Raises:
        UserError: there is no loss in it, it is not one number, or no gradient can be computed of it.
    """
    if isinstance(result, Mapping):
        result = result.get("loss", result)
    elif hasattr(result, "loss"):
        result = result.loss
    if isinstance(result, tuple) and len(result) == 2 and _is_count(result[1]):
        _check_graph(result[0], field)
        return result
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor) and not result[0].dim():
        result = result[0]
    if isinstance(result, Tensor) and not result.dim():
        _check_graph(result, field)
        return result, None
    if result is None or isinstance(result, (Mapping, tuple)):
        raise UserError(
            "there is no loss in what was returned",
            field=field,
            got=_described(result),
            allowed="a loss, (loss, output), (sum, count), or an object or mapping with `loss`",
            remedy="Add labels to the batch if the model computes its loss from them, or return the loss from"
            " training_step=lambda model, batch: ...",
        )
    raise UserError(
        "a loss must be one number",
        field=field,
        got=_described(result),
        allowed="a 0-dimensional tensor (the mean of the micro-batch), or (sum, count)",
        remedy="Call .mean() on a loss per sample"
        if isinstance(result, Tensor)
        else "Return the loss itself, without .item() or float()",
    )


def _check_graph(loss: Any, field: str) -> None:
    if isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            "the loss does not depend on a trainable parameter, so that no gradient can be computed",
            field=field,
            got="a tensor with requires_grad=False",
            allowed="a loss that is computed from the model's output",
            remedy="Leave out detach(), torch.no_grad() and torch.tensor(loss)",
        )


def check_output(output: Any) -> None:
    """Raise a UserError unless the built-in losses can read `output`."""
    if not isinstance(output, Tensor):
        raise UserError(
            "the model returned something else than the tensor that the loss reads",
            field="model",
            got=_described(output),
            allowed="a tensor, or an object with `logits`",
            remedy="Return the scores from forward, or give training_step=lambda model, batch: ...",
        )


def logits_of(output: Any) -> Any:
    """What a loss function reads of an `output`: its `logits` if it has any."""
    logits = None if isinstance(output, Tensor) else getattr(output, "logits", None)
    return output if logits is None else logits


def _is_count(value: Any) -> bool:
    """Whether the second of a pair is a count, and not the output that belongs to a loss."""
    return not value.dim() if isinstance(value, Tensor) else isinstance(value, (int, float))


def _described(result: Any) -> Any:
    if isinstance(result, Tensor):
        return tuple(result.shape)
    if isinstance(result, Mapping):
        return f"{type(result).__name__} of {', '.join(map(str, result)) or 'nothing'}"
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__
