"""Random signs that are a function of (seed, row, column), so that ranks agree without communication."""

from __future__ import annotations

import torch
from torch import Tensor

from distributed_kernels.errors import KernelError

SIGN_ALGORITHM = "mix32-v1"
"""Name of the function that makes the signs; saved beside a seed. Another function gets another name."""

_MASK = 0xFFFFFFFF
# Wellons' two-round mixer "16 21f0aaad 15 d35a2d97 15". The second factor is written as a negative
# number: products with a 32-bit integer then stay inside int64, whose overflow is undefined.
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97 - 2**32
_CHUNK = 2**18
"""Elements made at a time: scratch of a few megabytes, however large the matrix."""


def sketch_signs(
    seed: int,
    shape: tuple[int, int],
    *,
    offset: tuple[int, int] = (0, 0),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A matrix of +1 and -1, the same on every device, in every process and version.

    The sign at (row, column) is a hash of (`seed`, row, column) alone: the part of a large matrix
    that starts at `offset` is the slice of it, bit for bit.

    Args:
        seed: 0 to 2**63 - 1.
        shape: rows and columns of what is returned.
        offset: row and column of its first element in the whole matrix.
        device: as for `torch.empty`.
        dtype: as for `torch.empty`.

    Returns:
        Tensor of `shape`.

    Raises:
        KernelError: a seed out of range, or rows or columns that are negative or end past 2**32.
    """
    _check(seed, shape, offset)
    out = torch.empty(shape, device=device, dtype=dtype)
    if out.is_meta or not out.numel():
        return out
    row_key, column_key = _keys(seed)
    rows = _indices(offset[0], shape[0], row_key, out.device)
    columns = _indices(offset[1], shape[1], column_key, out.device)
    step = max(1, _CHUNK // shape[1])
    for start in range(0, shape[0], step):
        mixed = _mix(rows[start : start + step, None] ^ columns)
        out[start : start + step] = 1 - 2 * (mixed >> 31)
    return out


def _indices(first: int, count: int, key: int, device: torch.device) -> Tensor:
    index = torch.arange(first, first + count, device=device, dtype=torch.int64)
    return _mix(_mix(index) ^ key)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers, held in int64, in which every bit of `x` moves every bit."""
    x = x ^ (x >> 16)
    x.mul_(_FIRST).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(_SECOND).bitwise_and_(_MASK)
    x ^= x >> 15
    return x


def _keys(seed: int) -> tuple[int, int]:
    """Two 32-bit keys by splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z >> 32, z & _MASK


def _check(seed: int, shape: tuple[int, int], offset: tuple[int, int]) -> None:
    if not 0 <= seed < 2**63:
        raise KernelError(
            "seed: not in range", got=seed, allowed="0 to 2**63 - 1", remedy="Choose another seed"
        )
    if len(shape) != 2 or len(offset) != 2:
        raise KernelError(
            "shape, offset: a sketch is a matrix", got=(shape, offset), remedy="Give two numbers each"
        )
    for size, first in zip(shape, offset, strict=True):
        if size < 0 or first < 0 or first + size > 2**32:
            raise KernelError(
                "shape, offset: rows or columns out of range",
                got=(tuple(shape), tuple(offset)),
                allowed="not negative, and to end at 2**32 at most",
                remedy="Correct the slice",
            )
