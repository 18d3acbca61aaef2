"""Codec: how the ranks add up a tensor without sending all of it.

A codec is pure: it computes what to send, and what to make of what arrives, and leaves the sending to
`distributed.communication.coded_sum.CodedSum`. It is written as a generator that yields requests:

    def rounds(self, values, message):
        received = yield Gather(encode(values))     # the same payload size on all ranks
        return Result(total, contribution)

The generators of many parameters are run side by side, so that each round is one collective for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from distributed.config.compression import CompressionSection

__all__ = ["Codec", "Gather", "Message", "Request", "Result", "Rounds", "Scatter", "Share", "Sum"]


class Sum(NamedTuple):
    """Add up a tensor over the ranks. The reply is the sum, of the same shape and dtype."""

    values: Tensor


class Gather(NamedTuple):
    """Give all ranks the payloads of all. The reply is a tensor of shape (ranks, bytes).

    Attributes:
        payload: uint8, 1-dimensional; of the same length on all ranks.
    """

    payload: Tensor


class Scatter(NamedTuple):
    """Give each rank its rows of the payloads of all: rows ``message.owned``. The reply is a tensor of shape
    (ranks, owned rows, width).

    Attributes:
        rows: uint8 of shape (rows, width); the same on all ranks.
    """

    rows: Tensor


class Share(NamedTuple):
    """Give all ranks the rows of each, after a `Scatter`. The reply has the shape of its ``rows``.

    Attributes:
        rows: uint8 of shape (owned rows, width).
    """

    rows: Tensor


Request = Sum | Gather | Scatter | Share


class Result(NamedTuple):
    """The result of an exchange.

    Attributes:
        total: the sum over the ranks that is used from here on; the same bits on all ranks.
        contribution: this rank's part of `total`. The contributions of all ranks add up to it, so that the
            values less the contribution are what this rank has still to send.
    """

    total: Tensor
    contribution: Tensor


@dataclass
class Message:
    """The tensor that is exchanged, and the ranks that exchange it.

    Attributes:
        name: name of the parameter.
        step: number of exchanges before this one, since the run began.
        seed: seed of the run.
        rank: index of this rank among those that exchange.
        size: number of ranks that exchange.
        first_row: number that, modulo `size`, is the rank that owns the first row of a `Scatter`.
        state: tensors that the codec keeps between steps, the same on all ranks, by a name of its own. They
            are saved in checkpoints.
    """

    name: str
    step: int
    seed: int
    rank: int
    size: int
    first_row: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def owned(self) -> slice:
        """The rows of a `Scatter` that this rank adds up: every `size`-th."""
        return self.rows_of(self.rank)

    def rows_of(self, rank: int) -> slice:
        """The rows that `rank` adds up. Which they are does not depend on the buckets."""
        return slice((rank - self.first_row) % self.size, None, self.size)


Rounds = Generator[Request, Any, Result]


class Codec(ABC):
    """Base of all codecs. An instance serves all parameters; it keeps nothing but its options.

    Args:
        options: the section ``compression``.
        feeds_back: what is not sent is kept by the caller, and added to the next values.
    """

    def __init__(self, options: CompressionSection, feeds_back: bool) -> None:
        self.options, self.feeds_back = options, feeds_back

    @abstractmethod
    def rounds(self, values: Tensor, message: Message) -> Rounds:
        """Exchange `values` with the other ranks.

        Args:
            values: of float32 or float64, in the shape of what this rank holds of the parameter; not to be
                changed.
            message: of the same parameter on all ranks.
        """
