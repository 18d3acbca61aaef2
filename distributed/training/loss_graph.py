"""Read from autograd's graph what a loss that a function computed itself is a mean of.

``(loss * mask).sum() / mask.sum()`` and ``loss[mask].mean()`` have to be weighed by their divisors (C2), as
the means that `mean_losses` records have by their counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["average_of", "is_sum", "other_divisor"]

_SAME = {f"{name}Backward0" for name in ("Alias", "Clone", "Squeeze", "ToCopy", "Unsqueeze", "View")}
_SUMS = ("SumBackward0", "NansumBackward0")
_OF_OTHERS = ("Cat", "Mean", "Stack", "Sum")
"""What makes the elements of a tensor something else than losses of samples or tokens."""
_SUM = 2
"""reduction='sum' in nodes of torch's losses (``at::Reduction``)."""
_DEPTH = 6


def average_of(loss: Tensor) -> tuple[str, Tensor | int] | None:
    """(kind, count) of a sum divided by a number, or of a mean over selected elements; else None."""
    node = _skip(loss.grad_fn)
    divisor = _divisor(node)
    if divisor is not None:
        return "a divisor", divisor
    if _name(node) == "MeanBackward0" and any(_name(n) in _SELECTIONS for n in _below(node, _DEPTH)):
        return "elements", int(node._saved_self_sym_numel)
    return None


def is_sum(loss: Tensor) -> bool:
    """Whether a loss is the sum of what a loss of torch computed for each element."""
    node = _skip(loss.grad_fn)
    if getattr(node, "_saved_reduction", None) == _SUM:
        return True
    return _name(node) in _SUMS and hasattr(_skip(node.next_functions[0][0]), "_saved_reduction")


def other_divisor(loss: Tensor, num_samples: int) -> float | None:
    """A number by which a sum in `loss` was divided, and which is not one of each sample; or None."""
    for node in _terms(_skip(loss.grad_fn), _DEPTH):
        divisor = _divisor(node)
        if divisor is not None and divisor.device.type == "cpu" and num_samples:
            value = float(divisor)
            if value % num_samples:
                return value
    return None


_SELECTIONS = ("IndexBackward0", "MaskedSelectBackward0")
_LINEAR = ("AddBackward0", "MulBackward0", "SubBackward0")


def _divisor(node: Any) -> Tensor | None:
    """What a sum was divided by, unless that depends on parameters."""
    if _name(node) != "DivBackward0":
        return None
    above, below = (edge[0] for edge in node.next_functions)
    divisor = node._saved_other
    plain = below is None and isinstance(divisor, Tensor) and divisor.numel() == 1
    return divisor.detach().reshape(()) if plain and _is_sum(_skip(above), _DEPTH) else None


def _is_sum(node: Any, depth: int) -> bool:
    if _name(node) in _SUMS:
        return not _name(node.next_functions[0][0]).startswith(_OF_OTHERS)
    if _name(node) in _LINEAR and depth:
        parts = [_skip(edge[0]) for edge in node.next_functions if edge[0] is not None]
        return all(_is_sum(part, depth - 1) for part in parts)
    return getattr(node, "_saved_reduction", None) == _SUM


def _terms(node: Any, depth: int) -> Iterator[Any]:
    """`node` and the terms of the sum that it is."""
    yield node
    if _name(node) in _LINEAR and depth:
        for edge in node.next_functions:
            yield from _terms(_skip(edge[0]), depth - 1)


def _below(node: Any, depth: int) -> Iterator[Any]:
    for edge in node.next_functions if node is not None and depth else ():
        yield edge[0]
        yield from _below(edge[0], depth - 1)


def _skip(node: Any) -> Any:
    """The first node below that changes more than dtype and shape."""
    while _name(node) in _SAME:
        node = node.next_functions[0][0]
    return node


def _name(node: Any) -> str:
    return "" if node is None else str(node.name())
