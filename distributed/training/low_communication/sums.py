"""How changes of parameters are added up over the ranks: as they are, or by a codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from distributed.communication.coded_sum import CodedSum
from distributed.communication.wire import Reply, Wire
from distributed.config.compression import CompressionSection
from distributed.interfaces.codec import CodecSpec, dense_bytes

__all__ = ["ByCodec", "Dense", "NamedSum", "Pending"]


class Pending(Protocol):
    """Tensors that are being added up."""

    def finish(self) -> None:
        """Wait, and leave the sums in the tensors. Collective."""


class NamedSum(Protocol):
    """Adds up tensors over the ranks."""

    def begin(self, tensors: Mapping[str, Tensor]) -> Pending:
        """Start to add up `tensors`, by name, in the same order on all ranks. Collective."""

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        """Bytes that this rank sends for `tensors`."""


class Dense:
    """One all-reduce for each dtype.

    Args:
        wire: None for a single rank, which has the sums already.
    """

    def __init__(self, wire: Wire | None) -> None:
        self._wire = wire

    def begin(self, tensors: Mapping[str, Tensor]) -> Pending:
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors.values():
            groups.setdefault(tensor.dtype, []).append(tensor)
        if self._wire is None:
            return _PendingDense([])
        return _PendingDense(
            [(same, self._wire.sum(torch.cat([t.reshape(-1) for t in same]))) for same in groups.values()]
        )

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        world = 1 if self._wire is None else self._wire.size
        return sum(dense_bytes(tuple(t.shape), t.element_size(), world) for t in tensors.values())


class _PendingDense:
    def __init__(self, sent: list[tuple[list[Tensor], Reply]]) -> None:
        self._sent = sent

    def finish(self) -> None:
        for tensors, reply in self._sent:
            parts = reply().split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


class ByCodec:
    """A codec's exchange. Its number of steps is that of the exchanges that began, so that it does not depend
    on when they ended."""

    def __init__(self, coded: CodedSum, spec: CodecSpec, options: CompressionSection, world: int) -> None:
        self._coded, self._spec, self._options, self._world = coded, spec, options, world

    def begin(self, tensors: Mapping[str, Tensor]) -> Pending:
        pending = self._coded.begin(tensors)
        self._coded.step += 1
        return pending

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        return sum(
            self._spec.wire_bytes(tuple(t.shape), t.element_size(), self._options, self._world)
            for t in tensors.values()
        )
