"""How much each codec sends of a gradient. Imports no framework: a planner counts with these functions."""

from __future__ import annotations

from math import ceil, prod

from distributed.config.compression import CompressionSection
from distributed.interfaces.codec import Shape, Traffic

__all__ = [
    "BLOCK",
    "CAST_ROW",
    "cast_traffic",
    "eight_bit_traffic",
    "factor_rank",
    "number_sent",
    "power_sgd_traffic",
    "random_k_traffic",
    "top_k_traffic",
]

CAST_ROW = 64
"""Elements of a row of 16-bit numbers: what one rank adds up together."""
BLOCK = 256
"""Elements of a block of 8-bit numbers, which have one scale."""
_SCALE = 4


def number_sent(numel: int, ratio: float) -> int:
    """Number of elements, of `numel`, that a sparse codec sends: at least one."""
    return min(numel, max(1, ceil(numel * ratio)))


def factor_rank(shape: Shape, rank: int) -> int:
    """Number of columns of PowerSGD's factors of a gradient, as a matrix of ``shape[0]`` rows; 0 if it is
    sent as it is, because the factors would have as many elements."""
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, 0)
    used = min(rank, rows, columns)
    return used if (rows + columns) * used < rows * columns else 0


def cast_traffic(shape: Shape, itemsize: int, options: CompressionSection) -> Traffic:
    """Traffic of `fp16` and `bf16`: two bytes for each element."""
    return Traffic(scattered=2.0 * CAST_ROW * ceil(prod(shape) / CAST_ROW))


def eight_bit_traffic(shape: Shape, itemsize: int, options: CompressionSection) -> Traffic:
    """Traffic of `int8` and `fp8`: a byte for each element, and four for each block."""
    return Traffic(scattered=float(BLOCK + _SCALE) * ceil(prod(shape) / BLOCK))


def top_k_traffic(shape: Shape, itemsize: int, options: CompressionSection) -> Traffic:
    """Traffic of `top-k`: the elements that are sent, and an index for each."""
    numel = prod(shape)
    index = 4 if numel < 2**31 else 8
    return Traffic(gathered=float(number_sent(numel, options.ratio) * (itemsize + index)))


def random_k_traffic(shape: Shape, itemsize: int, options: CompressionSection) -> Traffic:
    """Traffic of `random-k`: the elements that are sent, without indices."""
    return Traffic(summed=float(number_sent(prod(shape), options.ratio) * itemsize))


def power_sgd_traffic(shape: Shape, itemsize: int, options: CompressionSection) -> Traffic:
    """Traffic of `powersgd`: two factors of a matrix, or the gradient itself where they would be as large."""
    rank = factor_rank(shape, options.rank)
    elements = rank * (shape[0] + prod(shape[1:])) if rank else prod(shape)
    return Traffic(summed=float(elements * itemsize))
