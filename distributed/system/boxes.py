"""Boxes in tensors: a range of indices along each dimension, and where it lies in the flattened tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

__all__ = ["first_element", "is_one_range", "ranges_of"]


def is_one_range(shape: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Whether a box of these lengths is one range of the flattened tensor of that shape."""
    last = len(shape)
    while last > 0 and lengths[last - 1] == shape[last - 1]:
        last -= 1
    return all(length == 1 for length in lengths[: max(last - 1, 0)]) or not prod(lengths)


def first_element(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Index of the box's first element in the flattened tensor."""
    start = 0
    for size, offset in zip(shape, offsets, strict=True):
        start = start * size + offset
    return start


def ranges_of(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """The box as ranges of the flattened tensor, in ascending order: (first element in the tensor, first
    element in the box, number of elements)."""
    # Dimensions that the box covers whole, at the end, make longer ranges.
    last = len(shape)
    while last > 0 and lengths[last - 1] == shape[last - 1]:
        last -= 1
    split = max(last - 1, 0)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = prod(lengths[split:])
    base = sum(o * s for o, s in zip(offsets[split:], strides[split:], strict=True))
    outer = [range(o, o + n) for o, n in zip(offsets[:split], lengths[:split], strict=True)]
    for number, index in enumerate(itertools.product(*outer)):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), number * count, count
