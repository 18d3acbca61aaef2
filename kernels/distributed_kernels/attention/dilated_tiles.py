"""Strided views of the rows that the branches of dilated attention keep, all heads in one view.

Head j keeps the rows j mod r, j mod r + r, ... of a segment, so the heads of one branch start at different
rows. A view whose stride from one head to the next also moves by one row reaches all of them: a branch is
gathered, and added back, by one copy for each tensor, without index tensors and without atomic additions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from distributed_kernels.errors import KernelError

HEAD_OFFSETS = ("interleaved", "grouped")
"""Words for the first row that a head keeps of a segment."""
_MAX_BATCH = 65535
"""Largest first dimension that the CUDA kernels take: it is a dimension of the launch grid."""


@dataclass(frozen=True)
class HeadOffsets:
    """First row of a segment that each head keeps.

    Attributes:
        kind: ``interleaved``, head j mod rate (LongNet, section 3.2), or ``grouped``, head j // (heads /
            rate), rounded up, as in torchscale.
        first: number of the first of the heads at hand.
        total: number of all heads; the heads at hand and those before when 0.
    """

    kind: str = "interleaved"
    first: int = 0
    total: int = 0

    def of(self, heads: int, rate: int) -> list[int]:
        """Offset of each of `heads` heads."""
        numbers = range(self.first, self.first + heads)
        if self.kind == "interleaved":
            return [number % rate for number in numbers]
        group = max(1, -(-max(self.total, self.first + heads) // rate))
        return [number // group for number in numbers]

    def groups(self, heads: int, rate: int) -> list[tuple[slice, int]]:
        """(heads, offset) of the heads that keep the same rows."""
        places: dict[int, list[int]] = {}
        for head, offset in enumerate(self.of(heads, rate)):
            places.setdefault(offset, []).append(head)
        step = rate if self.kind == "interleaved" else 1
        return [(slice(found[0], found[-1] + 1, step), offset) for offset, found in places.items()]


def check_head_offsets(kind: str) -> None:
    """Raise unless `kind` is one of `HEAD_OFFSETS`.

    Raises:
        KernelError: it is not.
    """
    if kind not in HEAD_OFFSETS:
        raise KernelError(
            "head_offsets: unknown",
            got=kind,
            allowed=", ".join(HEAD_OFFSETS),
            remedy="LongNet's paper has 'interleaved', torchscale's code 'grouped'",
        )


@dataclass(frozen=True)
class HeadRun:
    """Heads whose first rows lie at equal distances, in two levels: groups of heads, and heads of a group.

    Attributes:
        head: number of the first head.
        offset: first row of that head.
        size: number of heads in a group, which are neighbours.
        step: rows by which the next head of a group starts later.
        groups: number of groups.
        group_heads: heads from one group to the next.
        group_step: rows by which the next group starts later.
    """

    head: int
    offset: int
    size: int = 1
    step: int = 0
    groups: int = 1
    group_heads: int = 0
    group_step: int = 0

    @property
    def heads(self) -> int:
        return self.groups * self.size

    def with_head(self, head: int, offset: int) -> HeadRun | None:
        """This run of one group with one more head; None when that head does not fit."""
        step = offset - self.offset if self.size == 1 else self.step
        fits = head == self.head + self.size and offset == self.offset + self.size * step
        return HeadRun(self.head, self.offset, self.size + 1, step) if fits and step in (0, 1) else None

    def with_group(self, other: HeadRun) -> HeadRun | None:
        """This run with `other` as one more group; None when that does not fit."""
        heads, step = other.head - self.head, other.offset - self.offset
        if self.groups > 1:
            heads, step = self.group_heads, self.group_step
        fits = (
            (other.size, other.step) == (self.size, self.step)
            and other.head == self.head + self.groups * heads
            and other.offset == self.offset + self.groups * step
        )
        if not fits or step < 0:
            return None
        return HeadRun(self.head, self.offset, self.size, self.step, self.groups + 1, heads, step)


def head_runs(offsets: Sequence[tuple[int, int]]) -> tuple[HeadRun, ...]:
    """Runs of the (head, offset) pairs, in their order."""
    single: list[HeadRun] = []
    for head, offset in offsets:
        longer = single[-1].with_head(head, offset) if single else None
        single[len(single) - (longer is not None) :] = [longer or HeadRun(head, offset)]
    runs: list[HeadRun] = []
    for run in single:
        wider = runs[-1].with_group(run) if runs else None
        runs[len(runs) - (wider is not None) :] = [wider or run]
    return tuple(runs)


class Fold(NamedTuple):
    """How the blocks (B, h, S, m, ...) of one tile become the four dimensions of an attention operator.

    Attributes:
        by_segment: (B S, h, m, ...), for tensors that hold the heads of a row side by side; else (B h S, 1,
            m, ...) or (B h, S, m, ...).
        flat: the former of the last two.
    """

    by_segment: bool
    flat: bool

    @classmethod
    def of(cls, block: Tensor) -> Fold:
        """The fold that needs no copy of `block`, if there is one."""
        batch, heads, segments = block.shape[:3]
        outer, head, segment = block.stride()[:3]
        rows_of_head = heads == 1 or segments == 1 or head == segments * segment
        if rows_of_head and (batch == 1 or heads == 1 or outer == heads * head):
            return cls.contiguous(batch * heads, segments)
        joins = batch == 1 or segments == 1 or outer == segments * segment
        return cls(joins and batch * segments <= _MAX_BATCH, False)

    @classmethod
    def contiguous(cls, heads: int, segments: int) -> Fold:
        """The fold of contiguous blocks with so many heads in all sequences."""
        return cls(False, heads * segments <= _MAX_BATCH)

    def shape(self, batch: int, heads: int, segments: int) -> tuple[int, int]:
        """First two dimensions of a folded block."""
        if self.by_segment:
            return batch * segments, heads
        return (batch * heads * segments, 1) if self.flat else (batch * heads, segments)

    def fold(self, block: Tensor) -> Tensor:
        """(B, h, S, m, ...) -> the folded block."""
        shape = self.shape(*block.shape[:3])
        return (block.transpose(1, 2) if self.by_segment else block).reshape(*shape, *block.shape[3:])

    def unfold(self, block: Tensor, batch: int, heads: int, segments: int) -> Tensor:
        """Undo `fold`: (B, h, S, m, ...)."""
        if self.by_segment:
            return block.reshape(batch, segments, heads, *block.shape[2:]).transpose(1, 2)
        return block.reshape(batch, heads, segments, *block.shape[2:])


@dataclass(frozen=True)
class Tile:
    """Equally many rows of some heads in segments that lie side by side: one attention call.

    Attributes:
        start: first row of the first segment.
        width: rows of a segment.
        segments: number of segments.
        rate: rows from one kept row to the next.
        rows: kept rows of a segment.
        runs: the heads.
    """

    start: int
    width: int
    segments: int
    rate: int
    rows: int
    runs: tuple[HeadRun, ...]

    def view(self, x: Tensor, run: HeadRun) -> Tensor:
        """(B, H, N, ...) -> (B, groups, size, segments, rows, ...) of `run`, sharing memory."""
        batch, head, row, *rest = x.stride()
        between = (run.group_heads * head + run.group_step * row, head + run.step * row)
        first = x.storage_offset() + run.head * head + (self.start + run.offset) * row
        return x.as_strided(
            (x.shape[0], run.groups, run.size, self.segments, self.rows, *x.shape[3:]),
            (batch, *between, self.width * row, self.rate * row, *rest),
            first,
        )

    def gather(self, tensors: Sequence[Tensor], fold: Fold | None = None) -> tuple[list[Tensor], Fold]:
        """(B, H, N, ...) each, equally shaped -> blocks folded by `fold`: views where strides allow at rate
        1, else one contiguous copy of all."""
        if self.rate == 1:
            if fold is None and self._is_all(tensors):
                return self._all_rows(tensors)
            blocks = [self.view(x, run).flatten(1, 2) for x in tensors for run in self.runs]
            fold = fold or Fold.of(blocks[0])
            return [fold.fold(block) for block in blocks], fold
        stacked = [torch.stack([self.view(x, run) for x in tensors]) for run in self.runs]
        joined = torch.cat([x.flatten(2, 3) for x in stacked], 2) if len(stacked) > 1 else stacked[0]
        fold = Fold.contiguous(tensors[0].shape[0] * self.heads, self.segments)
        shape = fold.shape(tensors[0].shape[0], self.heads, self.segments)
        return list(joined.reshape(len(tensors), *shape, self.rows, *tensors[0].shape[3:]).unbind(0)), fold

    def _is_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tile is all of contiguous tensors."""
        heads, rows = tensors[0].shape[1:3]
        every = self.heads == heads and self.segments * self.width == rows
        return every and all(x.is_contiguous() for x in tensors)

    def _all_rows(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Fold]:
        """`gather` of a tile that is all of contiguous tensors: fewer views give the same blocks."""
        fold = Fold.contiguous(tensors[0].shape[0] * self.heads, self.segments)
        shape = fold.shape(tensors[0].shape[0], self.heads, self.segments)
        return [x.view(*shape, self.rows, *x.shape[3:]) for x in tensors], fold

    @cached_property
    def heads(self) -> int:
        """Number of heads."""
        return sum(run.heads for run in self.runs)

    @cached_property
    def launch_arguments(self) -> dict[str, int]:
        """Numbers from which a kernel computes the places of rows; of a tile with one run."""
        (run,) = self.runs
        return {
            "first": self.start + run.offset,
            "width": self.width,
            "segments": self.segments,
            "rate": self.rate,
            "rows": self.rows,
            "head": run.head,
            "size": run.size,
            "step": run.step,
            "groups": run.groups,
            "group_heads": run.group_heads,
            "group_step": run.group_step,
        }

    def matched(self, x: Tensor, block: Tensor, fold: Fold) -> Iterator[tuple[Tensor, Tensor]]:
        """(view of the rows of `x`, part of the folded `block`) for each run."""
        views = [self.view(x, run) for run in self.runs]
        if len(views) == 1 and not fold.by_segment:
            yield views[0], block.reshape(views[0].shape)
            return
        block, head = fold.unfold(block, x.shape[0], self.heads, self.segments), 0
        for run, view in zip(self.runs, views, strict=True):
            yield view, block[:, head : head + run.heads].reshape(view.shape)
            head += run.heads

    def whole(self, block: Tensor, fold: Fold, like: Tensor) -> Tensor:
        """The folded `block` of a tile of all rows -> (B, H, N, ...), of which `like` has the first three."""
        if fold.by_segment:
            block = fold.unfold(block, like.shape[0], self.heads, self.segments)
        return block.reshape(*like.shape[:3], *block.shape[4 if fold.by_segment else 3 :])


@dataclass(frozen=True)
class DilatedPlan:
    """Attention calls of all branches.

    Attributes:
        branches: tiles of each branch, by ascending rate.
        backward: tiles in the order of the backward; those that would need the most memory are halved.
        whole: the first branch is one tile of all rows, so that its results need no addition.
    """

    branches: tuple[tuple[Tile, ...], ...]
    backward: tuple[Tile, ...]
    whole: bool

    @cached_property
    def tiles(self) -> list[tuple[int, Tile]]:
        """(number of its branch, tile) of every tile."""
        return [(number, tile) for number, branch in enumerate(self.branches) for tile in branch]


@lru_cache(maxsize=256)
def dilated_plan(
    pairs: tuple[tuple[int, int], ...], length: int, heads: int, offsets: HeadOffsets
) -> DilatedPlan:
    """Plan of the branches `pairs`, (segment length, rate) each, of a sequence of `length` rows."""
    # A segment of all rows needs no addition where it comes first.
    pairs = tuple(sorted(pairs, key=lambda pair: (pair[1], length % min(pair[0], length))))
    every = range(heads)
    branches = tuple(tuple(_tiles(pair, length, every, offsets, heads)) for pair in pairs)
    whole = pairs[0][1] == 1 and len(branches[0]) == 1
    backward = list(branches[0]) if whole else []
    for width, rate in pairs[whole:]:
        # Gathered copies at rates 1 and 2 would be as large as the gradients that are there already.
        halves = (every[: heads // 2], every[heads // 2 :]) if rate <= 2 else (every,)
        for half in halves:
            backward += _tiles((width, rate), length, half, offsets, heads)
    return DilatedPlan(branches, tuple(backward), whole)


def _tiles(
    pair: tuple[int, int], length: int, chosen: range, offsets: HeadOffsets, heads: int
) -> Iterator[Tile]:
    """Tiles of one branch: of whole segments, then of a shorter last one; by numbers of kept rows."""
    width, rate = min(pair[0], length), pair[1]
    places = offsets.of(heads, rate)
    whole, rest = divmod(length, width)
    for start, size, segments in ((0, width, whole), (length - rest, rest, 1 if rest else 0)):
        by_rows: dict[int, list[tuple[int, int]]] = {}
        for head in chosen if segments else ():
            rows = len(range(places[head], size, rate))
            by_rows.setdefault(rows, []).append((head, places[head]))
        for rows, found in by_rows.items():
            if rows:
                yield Tile(start, size, segments, rate, rows, head_runs(found))
