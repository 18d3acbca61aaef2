"""CodecSpec: what a plugin registers of a gradient codec, and how many bytes it sends. Framework-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.config.compression import CompressionSection

__all__ = ["DENSE", "CodecSpec", "Shape", "Traffic", "dense_bytes"]

Shape = tuple[int, ...]

DENSE = "none"
"""Value of ``compression.codec`` with which gradients are reduced as they are."""


@dataclass(frozen=True)
class Traffic:
    """What one rank contributes to the exchange of one gradient, in bytes, by kind of collective.

    Attributes:
        summed: payload of all-reduces.
        gathered: payload of an all-gather: every rank receives that of every other one.
        scattered: payload of an all-to-all that gives each rank the same share of all payloads, and of the
            all-gather of as many bytes that returns the result.
    """

    summed: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0

    def sent(self, world: int) -> float:
        """Bytes that each of `world` ranks sends: a ring all-reduce sends 2 (n - 1) / n of its payload."""
        passes = 2.0 * (world - 1) / world
        return passes * (self.summed + self.scattered) + (world - 1) * self.gathered

    @property
    def kinds(self) -> frozenset[str]:
        """The collectives that are used: of ``sum``, ``gather`` and ``scatter``."""
        used = {"sum": self.summed, "gather": self.gathered, "scatter": self.scattered}
        return frozenset(kind for kind, nbytes in used.items() if nbytes)


@dataclass(frozen=True)
class CodecSpec:
    """What a plugin registers: enough to check and to plan with a codec without importing it.

    Attributes:
        name: the value of ``compression.codec``.
        target: ``package.module:Class`` of a `distributed.communication.codecs.base.Codec`, imported only
            when the codec is chosen.
        summary: one line for the reference.
        traffic: ``(shape of a gradient, bytes of one of its elements, options) ->`` its `Traffic`.
        exchanges: the collectives that the codec uses: of ``sum``, ``gather`` and ``scatter``.
        options: the fields of ``compression`` that it reads, besides `error_feedback`.
        error_feedback: whether what was not sent is added to the next gradient by default. False for a codec
            that rounds each element: its error is as small as that of the sum itself.
        scales: whether it can send gradients that a loss scale multiplies, whose largest values are not
            finite now and then (``mixed_precision=fp16``).
    """

    name: str
    target: str
    summary: str
    traffic: Callable[[Shape, int, CompressionSection], Traffic]
    exchanges: frozenset[str]
    options: frozenset[str] = frozenset()
    error_feedback: bool = True
    scales: bool = False

    def wire_bytes(self, shape: Shape, itemsize: int, options: CompressionSection, world: int) -> float:
        """Bytes that each rank sends in a step for a gradient of `shape`.

        Args:
            itemsize: bytes of one element of the gradient.
            world: number of ranks over which it is reduced.
        """
        return self.traffic(shape, itemsize, options).sent(world)

    def feeds_back(self, options: CompressionSection) -> bool:
        """Whether a residual is kept."""
        return self.error_feedback if options.error_feedback is None else options.error_feedback


def dense_bytes(shape: Shape, itemsize: int, world: int) -> float:
    """Bytes that each rank sends for a gradient that is not compressed."""
    return Traffic(summed=prod(shape) * itemsize).sent(world)
