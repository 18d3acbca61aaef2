"""Results of each collective in the tensors of its ranks, from the calls of all of them.

Every function takes the calls in the order of their ranks and writes into their outputs. Sums are added in
that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ARITHMETIC", "Call", "copy"]

Lists = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Call:
    """Arguments of one rank's call of a collective.

    Attributes:
        outputs: tensors to write, in lists as the collective has them.
        inputs: tensors to read, likewise.
        op: how values are reduced.
        root: rank of the group that sends or receives.
        sends, receives: rows for and of each rank; empty for equal numbers.
    """

    outputs: Lists = ()
    inputs: Lists = ()
    op: Any = None
    root: int = 0
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()


def copy(target: Tensor, source: Tensor) -> None:
    """Write `source` into `target`, which has as many elements, on any device and in any shape."""
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise ValueError(
            f"a tensor of {source.numel()} elements of {source.dtype} was sent where {target.numel()} of"
            f" {target.dtype} are expected"
        )
    # As a transport writes: autograd sees no change of a version.
    target.data.copy_(source.data.reshape(target.shape))


_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _reduced(op: Any, parts: Sequence[Tensor]) -> Tensor:
    state = op.__getstate__()  # of an enumeration's member, a number
    kind, factor = state if isinstance(state, tuple) else (op, None)
    if any(part.is_sparse for part in parts):
        raise NotImplementedError("ranks that are threads do not add up sparse tensors")
    home = parts[0].device
    values = [part.data.to(home) for part in parts]
    if kind == dist.ReduceOp.PREMUL_SUM:
        values = [value * factor for value in values]
    found = fold(_FOLDS[kind], values[1:], values[0].clone())
    return found / len(parts) if kind == dist.ReduceOp.AVG else found


def _all_reduce(calls: Sequence[Call]) -> None:
    for parts in zip(*(call.outputs[0] for call in calls), strict=True):
        found = _reduced(calls[0].op, parts)
        for part in parts:
            copy(part, found)


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[0].root
    for parts in zip(*(call.outputs[0] for call in calls), strict=True):
        copy(parts[root], _reduced(calls[0].op, parts))


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[0].root
    for parts in zip(*(call.outputs[0] for call in calls), strict=True):
        for part in parts:
            if part is not parts[root]:
                copy(part, parts[root])


def _all_gather(calls: Sequence[Call]) -> None:
    """Each of the inputs, into the list of outputs that belongs to it."""
    for number in range(len(calls[0].inputs[0])):
        for call in calls:
            for target, other in zip(call.outputs[number], calls, strict=True):
                copy(target, other.inputs[0][number])


def _gather(calls: Sequence[Call]) -> None:
    for target, call in zip(calls[calls[0].root].outputs[0], calls, strict=True):
        copy(target, call.inputs[0][0])


def _scatter(calls: Sequence[Call]) -> None:
    for source, call in zip(calls[calls[0].root].inputs[0], calls, strict=True):
        copy(call.outputs[0][0], source)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    """Write the sum of the inputs that belong to a rank, of each list, into its output of that number."""
    for number in range(len(calls[0].outputs[0])):
        for rank, call in enumerate(calls):
            parts = [other.inputs[number][rank] for other in calls]
            copy(call.outputs[0][number], _reduced(call.op, parts))


def _all_to_all(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        for target, other in zip(call.outputs[0], calls, strict=True):
            copy(target, other.inputs[0][rank])


def _exchange_rows(calls: Sequence[Call]) -> None:
    size = len(calls)
    sent = [_rows(call.inputs[0][0], call.sends, size) for call in calls]
    for rank, call in enumerate(calls):
        targets = _rows(call.outputs[0][0], call.receives, size)
        for target, parts in zip(targets, sent, strict=True):
            copy(target, parts[rank])


def _rows(tensor: Tensor, numbers: Sequence[int], size: int) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = tensor.data.split(list(numbers) or [len(tensor) // size] * size)
    return parts


def _barrier(calls: Sequence[Call]) -> None:
    """Nothing: all have called."""


ARITHMETIC: dict[str, Callable[[Sequence[Call]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _exchange_rows,
    "barrier": _barrier,
}
"""Name of a collective -> what it does."""
