"""Codecs that round each element: to 16 bits, or to 8 bits with a scale for each block of elements.

The ranks exchange rows of encoded elements twice. In the first pass each rank receives its rows from all
others, decodes and adds them in the order of the ranks; in the second it sends the encoded sums to all. Each
pass sends (n - 1) / n of the payload, as the passes of a ring all-reduce do. The saving therefore does not
depend on the number of ranks, and no value is rounded more than twice.

Source of the two passes: Tang et al., 1-bit Adam, arXiv 2102.02888.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from distributed.communication.codecs.base import Codec, Message, Result, Rounds, Scatter, Share
from distributed.communication.codecs.sizes import BLOCK, CAST_ROW

__all__ = ["BFloat16Codec", "Float8Codec", "Float16Codec", "Int8Codec", "RowCodec"]


class RowCodec(Codec):
    """Base of codecs that encode rows of elements by themselves.

    Attributes:
        row: number of elements of a row; the last row of a parameter is filled with zeros.
    """

    row: int

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Rows of elements as uint8 of shape (rows, bytes)."""

    @abstractmethod
    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """The opposite, as `dtype`; of any number of leading dimensions."""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        flat, dtype = values.reshape(-1), values.dtype
        rows = flat.new_zeros(-(-flat.numel() // self.row), self.row)
        rows.view(-1)[: flat.numel()] = flat
        encoded = self.encode(rows)
        received = yield Scatter(encoded)
        sums = torch.zeros(received.shape[1], self.row, dtype=dtype, device=flat.device)
        for payload in received:
            sums += self.decode(payload, dtype)
        shared = yield Share(self.encode(sums))
        total, own = self.decode(shared, dtype), self.decode(encoded, dtype)
        # The rounding of a sum is the error of the rank that has added it up.
        own[message.owned] += total[message.owned] - sums
        return Result(*(found.view(-1)[: flat.numel()].view(values.shape) for found in (total, own)))


class _CastCodec(RowCodec):
    row = CAST_ROW
    narrow: torch.dtype

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.narrow).view(torch.uint8)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        return data.view(self.narrow).to(dtype)


class Float16Codec(_CastCodec):
    """IEEE half precision: 11 bits of precision; a value or sum beyond 65504 is infinite."""

    narrow = torch.float16


class BFloat16Codec(_CastCodec):
    """bfloat16: 8 bits of precision, and the range of float32."""

    narrow = torch.bfloat16


class _ScaledCodec(RowCodec):
    """Elements of 8 bits and one float32 scale for each row: its largest magnitude over `largest`."""

    row = BLOCK
    largest: float

    def encode(self, rows: Tensor) -> Tensor:
        scale = (rows.abs().amax(1, keepdim=True) / self.largest).float()
        # A scale that rounds to zero is that of a row that rounds to zero.
        units = torch.where(scale > 0, rows / scale, torch.zeros_like(rows))
        # Not finite, it makes the whole row so, which is noticed after the reduction.
        scale = torch.where(torch.isfinite(scale), scale, torch.full_like(scale, torch.nan))
        return torch.cat([self._narrow(units).view(torch.uint8), scale.view(torch.uint8)], 1)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        units, scale = data[..., : self.row], data[..., self.row :]
        wide = self._widen(units.contiguous(), dtype)
        return wide * scale.contiguous().view(torch.float32).to(dtype)

    @abstractmethod
    def _narrow(self, units: Tensor) -> Tensor:
        """Values between `-largest` and `largest` in 8 bits each."""

    @abstractmethod
    def _widen(self, units: Tensor, dtype: torch.dtype) -> Tensor:
        """The opposite, from bytes."""


class Int8Codec(_ScaledCodec):
    """Whole numbers from -127 to 127, times the scale of the row."""

    largest = 127.0

    def _narrow(self, units: Tensor) -> Tensor:
        return torch.nan_to_num(units, 0.0).round_().clamp_(-127, 127).to(torch.int8)

    def _widen(self, units: Tensor, dtype: torch.dtype) -> Tensor:
        return units.view(torch.int8).to(dtype)


class Float8Codec(_ScaledCodec):
    """float8 e4m3: 4 bits of precision relative to each element, times the scale of the row."""

    largest = 448.0

    def _narrow(self, units: Tensor) -> Tensor:
        return units.float().clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)

    def _widen(self, units: Tensor, dtype: torch.dtype) -> Tensor:
        return units.view(torch.float8_e4m3fn).to(dtype)
