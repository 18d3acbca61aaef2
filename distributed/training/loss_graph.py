"""Read from autograd's graph what a loss that a function computed itself is a mean of.

``(loss * mask).sum() / mask.sum()`` and ``loss[mask].mean()`` have to be weighed by their divisors (C2), as
the means that `mean_losses` records have by their counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["average_of", "has_constant_divisor", "is_sum", "other_divisor"]

_SAME = {f"{name}Backward0" for name in ("Alias", "Clone", "Squeeze", "ToCopy", "Unsqueeze", "View")}
_SUMS = ("SumBackward0", "NansumBackward0", "SumBackward1")
_JOINS = ("Cat", "Stack")
_ELEMENTWISE = (
    *("Abs", "Add", "BinaryCrossEntropy", "Clamp", "Div", "Exp", "Expm1", "Log", "Mean", "Mul", "Neg", "Pow"),
    *("Reciprocal", "Relu", "Rsub", "Sigmoid", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where"),
)
"""Operations between an output and a sum of losses, by the beginning of their names in autograd."""
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


def is_sum(loss: Tensor, num_samples: int) -> bool:
    """Whether a term of a loss is a sum over the `num_samples` samples of a micro-batch, not a mean."""
    return any(_sums_samples(node, num_samples) for node in _terms(_skip(loss.grad_fn), _DEPTH))


def has_constant_divisor(loss: Tensor, num_samples: int) -> bool:
    """Whether a sum was divided by 1 or 2 where there are more samples: a factor rather than a count."""
    divisor = _divisor(_skip(loss.grad_fn))
    return divisor is not None and num_samples > _FACTOR and float(divisor) in (1, _FACTOR)


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
_LINEAR = ("AddBackward0", "MulBackward0", "NegBackward0", "RsubBackward1", "SubBackward0")
_FACTOR = 2


def _sums_samples(node: Any, num_samples: int) -> bool:
    if getattr(node, "_saved_reduction", None) == _SUM:
        return True
    if _name(node) not in _SUMS:
        return False
    below = node.next_functions[0][0]
    if hasattr(_skip(below), "_saved_reduction"):
        return True
    sizes = node._saved_self_sym_sizes
    flat = len(sizes) == 1 and num_samples > 0 and sizes[0] % num_samples == 0
    per_sample = sizes[:1] == (num_samples,) or flat
    return num_samples > 1 and per_sample and _is_per_sample(below)


def _is_per_sample(node: Any) -> bool:
    """Whether elements were computed one by one from an output of a model.

    Those of parameters, those of other means, and those that weights with the sum 1 were multiplied into
    are not.
    """
    from_output, todo, seen = False, [node], 0
    while todo and seen < _BOUND:
        node, seen = todo.pop(), seen + 1
        name = _name(node)
        if name.startswith(_JOINS) or _is_mean_over_samples(node) or _normalizes(node):
            return False
        if name in _SAME or name.startswith(_ELEMENTWISE):
            todo += [edge[0] for edge in node.next_functions if edge[0] is not None]
        else:
            from_output |= not name.endswith("AccumulateGrad")
    return from_output


_BOUND = 64


def _is_mean_over_samples(node: Any) -> bool:
    """Whether dimension 0 was reduced."""
    if not _name(node).startswith(("Mean", "Sum")):
        return False
    rank = len(getattr(node, "_saved_self_sym_sizes", ()))
    dims = getattr(node, "_saved_dim", None)
    # Negative dimensions are saved as unsigned numbers.
    return not dims or any(d in (0, (1 << 64) - rank) for d in dims)


def _normalizes(node: Any) -> bool:
    """Whether a constant was divided by, or weights with the sum 1 were multiplied."""
    name, edges = _name(node), [edge[0] for edge in node.next_functions]
    if name == "DivBackward0":
        return edges[1] is None
    if name != "MulBackward0" or None not in edges:
        return False
    factor = node._saved_other if edges[1] is None else node._saved_self
    return isinstance(factor, Tensor) and factor.dim() > 0 and abs(float(factor.detach().sum()) - 1) < 1e-4


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
