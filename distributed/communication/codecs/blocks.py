"""Codecs that round each element: to 16 bits, or to 8 bits with a scale for each block of elements.

The ranks exchange rows of encoded elements twice. In the first pass each rank receives its rows from all
others, decodes and adds them in the order of the ranks; in the second it sends the encoded sums to all. Each
pass sends (n - 1) / n of the payload, as the passes of a ring all-reduce do. The saving therefore does not
depend on the number of ranks, and no value is rounded more than twice.

Source of the two passes: Tang et al., 1-bit Adam, arXiv 2102.02888.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from distributed.communication.codecs.base import Codec, Message, Result, Rounds, Scatter, Share
from distributed.communication.codecs.sizes import BLOCK, CAST_ROW

__all__ = ["BFloat16Codec", "Float8Codec", "Float16Codec", "Int8Codec", "RowCodec"]


_ELEMENTS = 1 << 16
"""On the CPU, as many are encoded or decoded at once: all passes over them find them in the cache."""


class RowCodec(Codec):
    """Base of codecs that encode rows of elements by themselves.

    Attributes:
        row: number of elements of a row; the last row of a parameter is filled with zeros.
        width: bytes of an encoded row.
    """

    row: int
    width: int

    @abstractmethod
    def encode(self, rows: Tensor, data: Tensor) -> None:
        """Write rows of elements to `data`, uint8 of shape (rows, `width`)."""

    @abstractmethod
    def decode(self, data: Tensor, rows: Tensor) -> None:
        """The opposite."""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        rows = self._rows(values)
        encoded = self._encoded(rows)
        received = yield Scatter(encoded)
        sums = self._summed(received, rows)
        shared = yield Share(self._encoded(sums))
        total, own = (self._summed(data.unsqueeze(0), rows) for data in (shared, encoded))
        # The rounding of a sum is the error of the rank that has added it up.
        own[message.owned] += total[message.owned] - sums
        return Result(*(found.view(-1)[: values.numel()].view(values.shape) for found in (total, own)))

    def _rows(self, values: Tensor) -> Tensor:
        """`values` as (rows, elements)."""
        flat = values.reshape(-1)
        missing = -flat.numel() % self.row
        return (nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, self.row)

    def _encoded(self, rows: Tensor) -> Tensor:
        data = rows.new_empty(len(rows), self.width, dtype=torch.uint8)
        for part in self._parts(rows):
            self.encode(rows[part], data[part])
        return data

    def _summed(self, received: Tensor, like: Tensor) -> Tensor:
        """The sum of what several ranks have encoded, in their order.

        Args:
            received: (ranks, rows, `width`).
            like: of the dtype of the sum.
        """
        total = like.new_empty(received.shape[1], self.row)
        for part in self._parts(total):
            first, *others = received[:, part]
            self.decode(first, total[part])
            for data in others:
                added = torch.empty_like(total[part])
                self.decode(data, added)
                total[part] += added
        return total

    def _parts(self, rows: Tensor) -> Iterator[slice]:
        """Rows that are encoded or decoded at once."""
        step = _ELEMENTS // self.row if rows.device.type == "cpu" else max(1, len(rows))
        for start in range(0, len(rows), step):
            yield slice(start, start + step)


class _CastCodec(RowCodec):
    row, width = CAST_ROW, 2 * CAST_ROW
    narrow: torch.dtype

    def encode(self, rows: Tensor, data: Tensor) -> None:
        data.view(self.narrow).copy_(rows)

    def decode(self, data: Tensor, rows: Tensor) -> None:
        rows.copy_(data.view(self.narrow))


class Float16Codec(_CastCodec):
    """IEEE half precision: 11 bits of precision; a value or sum beyond 65504 is infinite."""

    narrow = torch.float16


class BFloat16Codec(_CastCodec):
    """bfloat16: 8 bits of precision, and the range of float32."""

    narrow = torch.bfloat16


class _ScaledCodec(RowCodec):
    """Elements of 8 bits and one float32 scale for each row: its largest magnitude over `largest`."""

    row, width = BLOCK, BLOCK + 4
    narrow: torch.dtype
    largest: float

    def encode(self, rows: Tensor, data: Tensor) -> None:
        scale = (rows.abs().amax(1, keepdim=True) / self.largest).float()
        # A scale that rounds to zero is that of a row that rounds to zero.
        units = rows / scale.masked_fill(scale == 0, torch.inf)
        data[:, : self.row].view(self.narrow).copy_(self._rounded(units))
        # Not finite, it makes the whole row so, which is noticed after the reduction.
        scale.masked_fill_(~torch.isfinite(scale), torch.nan)
        data[:, self.row :] = scale.view(torch.uint8)

    def decode(self, data: Tensor, rows: Tensor) -> None:
        rows.copy_(data[:, : self.row].view(self.narrow))
        rows.mul_(data[:, self.row :].contiguous().view(torch.float32))

    @abstractmethod
    def _rounded(self, units: Tensor) -> Tensor:
        """Values that `narrow` has, from those between `-largest` and `largest`, which may be overwritten."""


class Int8Codec(_ScaledCodec):
    """Whole numbers from -127 to 127, times the scale of the row."""

    narrow, largest = torch.int8, 127.0

    def _rounded(self, units: Tensor) -> Tensor:
        return units.nan_to_num_(0.0).round_().clamp_(-127, 127)


class Float8Codec(_ScaledCodec):
    """float8 e4m3: 4 bits of precision relative to each element, times the scale of the row."""

    narrow, largest = torch.float8_e4m3fn, 448.0

    def _rounded(self, units: Tensor) -> Tensor:
        return units.float().clamp_(-448.0, 448.0)
