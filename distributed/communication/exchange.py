"""How the ranks of a wire add up tensors by name, and `DenseSum`, which sends them as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from distributed.communication.wire import Reply, Wire
from distributed.interfaces.codec import dense_bytes

__all__ = ["DenseSum", "Exchange", "PendingExchange"]


class PendingExchange(Protocol):
    """Tensors that are being added up."""

    @property
    def is_completed(self) -> Callable[[], bool] | None:
        """Returns, without waiting, whether all of them have arrived; None if that is not known."""

    def finish(self) -> None:
        """Wait, and leave the sums in the tensors. Collective."""


class Exchange(Protocol):
    """Adds up tensors over the ranks of a wire."""

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingExchange:
        """Start to add up `tensors`, by name, in the same order on all ranks. Collective."""

    def add(self, values: Tensor) -> Tensor:
        """Add up a small tensor as it is, which may be overwritten. Collective."""


class DenseSum:
    """An `Exchange` without a codec: one all-reduce for each dtype.

    Args:
        wire: None for a single rank, whose tensors are the sums already.
    """

    def __init__(self, wire: Wire | None) -> None:
        self._wire = wire

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingExchange:
        """Start to add up `tensors`, by name, in the same order on all ranks. Collective."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors.values() if self._wire is not None else ():
            groups.setdefault(tensor.dtype, []).append(tensor)
        return _PendingDense([(same, self._sum(_flatten_dense_tensors(same))) for same in groups.values()])

    def add(self, values: Tensor) -> Tensor:
        """Add up a small tensor, which may be overwritten. Collective."""
        return self._sum(values)()

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        """Bytes that this rank sends for `tensors`."""
        size = 1 if self._wire is None else self._wire.size
        return sum(dense_bytes(tuple(t.shape), t.element_size(), size) for t in tensors.values())

    def _sum(self, values: Tensor) -> Reply:
        return Reply(lambda: values) if self._wire is None else self._wire.sum(values)


class _PendingDense:
    def __init__(self, sent: list[tuple[list[Tensor], Reply]]) -> None:
        self._sent = sent

    @property
    def is_completed(self) -> Callable[[], bool] | None:
        # Not an attribute: an object that refers to itself keeps its tensors until garbage is collected.
        known = all(reply.is_completed is not None for _, reply in self._sent)
        return self._have_arrived if known else None

    def _have_arrived(self) -> bool:
        return all(reply.is_completed is not None and reply.is_completed() for _, reply in self._sent)

    @torch.no_grad()
    def finish(self) -> None:
        for tensors, reply in self._sent:
            torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(reply(), tensors)))
