"""Strided views of the rows and heads that a piece of attention reads and writes.

No index tensors: a view of a single row range needs no copy, and a sum into a view needs no
atomic additions, because a `RowView` has no row of a head twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

EVERY_HEAD = slice(None)


@dataclass(frozen=True)
class RowRange:
    """`length` rows, `step` apart, from `offset` on, in each of `segments` windows of `width` rows.

    The windows lie side by side from row `start` on.
    """

    start: int
    width: int
    length: int
    segments: int = 1
    offset: int = 0
    step: int = 1

    def view(self, x: Tensor) -> Tensor:
        """(B, h, N, ...) -> (B, h, segments, length, ...), sharing memory."""
        rows = x.narrow(2, self.start, self.segments * self.width)
        windows: Tensor = rows.unflatten(2, (self.segments, self.width))
        end = self.offset + max(self.step * (self.length - 1) + 1, 0)
        return windows[:, :, :, self.offset : end : self.step]

    def part(self, first: int, end: int) -> RowRange:
        """Rows `first` to `end` of every window's rows."""
        return replace(self, offset=self.offset + self.step * first, length=end - first)


@dataclass(frozen=True)
class RowView:
    """Groups of heads, each with its row ranges; the ranges of one group are joined along the rows.

    Every group has equally many segments, and equally many rows in all.
    """

    groups: tuple[tuple[slice, tuple[RowRange, ...]], ...]

    @classmethod
    def rows(cls, *row_ranges: RowRange, heads: slice = EVERY_HEAD) -> RowView:
        """The same rows of all of `heads`."""
        return cls(((heads, row_ranges),))

    @classmethod
    def all(cls, length: int) -> RowView:
        """Every row of every head."""
        return cls.rows(RowRange(0, length, length))

    @property
    def length(self) -> int:
        """Rows of a head in one segment."""
        return sum(row_range.length for row_range in self.groups[0][1])

    @property
    def segments(self) -> int:
        return self.groups[0][1][0].segments

    def parts(self, ranges: Sequence[tuple[int, int]], heads: slice = EVERY_HEAD) -> RowView:
        """Rows [first, end) of every segment for each of `ranges`, joined; each group must be one row range.

        `heads` other than all needs a row view of one group of all heads.
        """
        groups = []
        for own, (row_range,) in self.groups:
            group = own if heads == EVERY_HEAD else heads
            groups.append((group, tuple(row_range.part(first, end) for first, end in ranges)))
        return RowView(tuple(groups))

    def covers(self, length: int) -> bool:
        """Whether these are all rows of all heads in their order: then a block is the tensor itself."""
        if len(self.groups) != 1 or len(self.groups[0][1]) != 1:
            return False
        heads, (row_range,) = self.groups[0]
        whole = (
            row_range.step == 1
            and row_range.length == row_range.width
            and row_range.segments * row_range.width == length
        )
        return heads == EVERY_HEAD and whole

    def heads(self, total: int) -> int:
        """Number of the `total` heads in this view."""
        return sum(len(range(total)[heads]) for heads, _ in self.groups)

    def views(self, x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first head, first row, view) of each row range within the gathered block."""
        head = 0
        for heads, row_ranges in self.groups:
            row, own = 0, x[:, heads]
            for row_range in row_ranges:
                yield head, row, row_range.view(own)
                row += row_range.length
            head += own.shape[1]

    def gather(self, x: Tensor) -> Tensor:
        """(B, H, N, ...) -> (B, heads, segments, length, ...): a view of one row range, else a copy."""
        if len(self.groups) == 1:
            row_ranges = [view for _, _, view in self.views(x)]
            return row_ranges[0] if len(row_ranges) == 1 else torch.cat(row_ranges, 3)
        block = x.new_empty(self.shape(x))
        for part, view in self.matched(x, block):
            part.copy_(view)
        return block

    def add_to(self, x: Tensor, block: Tensor) -> None:
        """Add a gathered block to the rows it came from."""
        for part, view in self.matched(x, block):
            view.add_(part)

    def matched(self, x: Tensor, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the gathered block, view of the rows it came from) for each row range."""
        for head, row, view in self.views(x):
            yield block[:, head : head + view.shape[1], :, row : row + view.shape[3]], view

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of the block that `gather` makes of `x`."""
        return (x.shape[0], self.heads(x.shape[1]), self.segments, self.length, *x.shape[3:])
