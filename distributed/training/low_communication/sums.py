"""How changes of parameters are added up over the ranks, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from distributed.communication.coded_sum import CodedSum
from distributed.communication.exchange import PendingExchange
from distributed.config.compression import CompressionSection
from distributed.interfaces.codec import CodecSpec

__all__ = ["ByCodec", "NamedSum"]


class NamedSum(Protocol):
    """Adds up tensors over the ranks: `distributed.communication.exchange.DenseSum`, or `ByCodec`."""

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingExchange:
        """Start to add up `tensors`, by name, in the same order on all ranks. Collective."""

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        """Bytes that this rank sends for `tensors`."""


class ByCodec:
    """Adds up tensors by a codec.

    A step of the codec is an exchange that has begun, so that its number does not depend on when exchanges
    end.

    Args:
        coded: the codec's exchange between the ranks.
        spec: what is registered of the codec.
        options: the section ``compression``.
        world: number of ranks.
    """

    def __init__(self, coded: CodedSum, spec: CodecSpec, options: CompressionSection, world: int) -> None:
        self._coded, self._spec, self._options, self._world = coded, spec, options, world

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingExchange:
        pending = self._coded.begin(tensors)
        self._coded.step += 1
        return pending

    def sent_bytes(self, tensors: Mapping[str, Tensor]) -> float:
        return sum(
            self._spec.wire_bytes(tuple(t.shape), t.element_size(), self._options, self._world)
            for t in tensors.values()
        )
