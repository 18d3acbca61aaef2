"""Which collective an operation of torch is, between which ranks, and over how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

__all__ = ["collective_of"]

_NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "isend": "send",
}
"""torch's names (2.13) of collectives; a receive is the other side of a send."""


def collective_of(operation: Any, args: tuple[Any, ...], result: Any) -> tuple[str, str, int] | None:
    """(kind as in `Collective`, name of the process group, bytes of the whole tensor); None for another
    operation."""
    if operation.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = _NAMES.get(operation._schema.name.partition("::")[2])
    if name is None:
        return None
    tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
    lists = [_nbytes(value) for value in (*args, *_parts(result))]
    nbytes = max([t.numel() * t.element_size() for t in tensors] + lists)
    return name, next(_group_names(args), ""), nbytes


def _nbytes(value: Any) -> int:
    """Bytes of a list of tensors, as an all-gather returns."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in found)


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _group_names(args: tuple[Any, ...]) -> Iterator[str]:
    for value in args:
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            yield value
        elif hasattr(value, "_type") and callable(value._type) and "ProcessGroup" in str(value._type()):
            yield str(ProcessGroup.unbox(value).group_name)
