"""Patterns of kept (query, key) pairs that are exact to the position: windows and documents.

A pair (i, j) is kept where i - j <= before, j - i <= after, and both positions are in one document. Blocks of
pairs are full, partial or empty by arithmetic on their corners; only partial ones need the pairs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from distributed_kernels.errors import KernelError


@dataclass(frozen=True)
class PairPattern:
    """Kept pairs of a sequence; `&` keeps what both keep.

    Attributes:
        length: positions of the sequence.
        before: positions before its own that a query sees; None without a limit.
        after: positions after its own that a query sees; None without a limit.
        lengths: lengths of the documents, in their order; one of all positions without documents.
    """

    length: int
    before: int | None
    after: int | None
    lengths: tuple[int, ...]

    def __and__(self, other: PairPattern) -> PairPattern:
        if self.length != other.length:
            raise KernelError(
                "patterns: of sequences of other lengths",
                got=(self.length, other.length),
                allowed="equal lengths",
                remedy="Build both for the length of q",
            )
        limits = [_smaller(*pair) for pair in ((self.before, other.before), (self.after, other.after))]
        ends = sorted({*accumulate(self.lengths), *accumulate(other.lengths)})
        lengths = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        return PairPattern(self.length, limits[0], limits[1], lengths)

    def causal(self) -> PairPattern:
        """This pattern without later positions."""
        return self & PairPattern(self.length, None, 0, (self.length,))

    def documents(self, device: torch.device | str = "cpu") -> Tensor:
        """Number of the document of each position, int64 (length,)."""
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(len(self.lengths), device=device).repeat_interleave(lengths)

    def mask_mod(self, device: torch.device | str = "cpu") -> Callable[..., Tensor]:
        """A function (batch, head, query, key) -> bool of positions, as `flex_attention` takes it."""
        before, after = self.before, self.after
        numbers = self.documents(device) if len(self.lengths) > 1 else None

        def keeps(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            kept = (query >= 0) & (key >= 0)
            if before is not None:
                kept = kept & (query - key <= before)
            if after is not None:
                kept = kept & (key - query <= after)
            return kept if numbers is None else kept & (numbers[query] == numbers[key])

        return keeps

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query position keeps each key position, bool (queries, keys)."""
        none = queries.new_zeros(())
        return self.mask_mod(queries.device)(none, none, queries[:, None], keys[None, :])

    def blocks(self, block_size: int) -> tuple[Tensor, Tensor]:
        """(full, partial), bool (blocks, blocks) each, queries by keys, on the CPU; the last may be short.

        `full`: all pairs of the block are kept. `partial`: `mask_mod` decides; at least one pair is kept, or,
        for windows over documents, none. In other blocks none is kept.
        """
        if block_size < 1:
            raise KernelError("block_size: must be positive", got=block_size, allowed="1 and more")
        first = torch.arange(0, self.length, block_size)
        last = (first + block_size).clamp(max=self.length) - 1
        least, most = first[:, None] - last[None, :], last[:, None] - first[None, :]
        full, some = (torch.ones(len(first), len(first), dtype=torch.bool) for _ in range(2))
        if self.before is not None:
            full, some = full & (most <= self.before), some & (least <= self.before)
        if self.after is not None:
            full, some = full & (least >= -self.after), some & (most >= -self.after)
        numbers = self.documents()
        low, high = numbers[first], numbers[last]
        some &= (low[:, None] <= high[None, :]) & (low[None, :] <= high[:, None])
        full &= (low[:, None] == high[None, :]) & (low[None, :] == high[:, None])
        return full, some & ~full


def sliding_window(length: int, before: int | None, after: int | None = 0) -> PairPattern:
    """The pattern of a query that sees `before` positions before its own, itself, and `after` later ones.

    flash-attn's ``window_size=(left, right)`` is ``sliding_window(length, left, right)``, with None for -1.

    Args:
        length: positions of the sequence.
        before: earlier positions; None for all.
        after: later positions; None for all, 0 for a causal window.

    Raises:
        KernelError: a negative number.
    """
    for name, value in (("length", length), ("before", before), ("after", after)):
        if value is not None and value < 0:
            raise KernelError(
                f"{name}: a number of positions cannot be negative",
                got=value,
                allowed="0 and more, or None without a limit",
                remedy="flash-attn's -1 is None here",
            )
    return PairPattern(length, before, after, (length,))


def documents(lengths: Sequence[int] | Tensor) -> PairPattern:
    """The pattern of documents that lie one after the other in a row, of which a query sees its own alone.

    flash-attn's ``cu_seqlens`` are ``documents(cu_seqlens.diff())``. A causal pattern is
    ``documents(lengths).causal()``, or `causal` of the attention.

    Args:
        lengths: positions of each document; their sum is that of the sequence. Empty ones are left out.

    Raises:
        KernelError: a length that is negative or no whole number, or numbers that are ``cu_seqlens``.
    """
    found = [int(each) for each in lengths]
    if any(each < 0 or each != given for each, given in zip(found, lengths, strict=True)):
        raise KernelError(
            "lengths: must be positions of each document",
            got=found,
            allowed="0 and more, whole numbers",
            remedy="Give cu_seqlens.diff() for flash-attn's cu_seqlens",
        )
    if len(found) > 1 and found[0] == 0 and found == sorted(found):
        raise KernelError(
            "lengths: these begin with 0 and grow, as the ends of documents do",
            got=found,
            allowed="positions of each document",
            remedy="Give cu_seqlens.diff(), and leave out a first document that is empty",
        )
    return PairPattern(sum(found), None, None, tuple(each for each in found if each))


def _smaller(first: int | None, second: int | None) -> int | None:
    return min((each for each in (first, second) if each is not None), default=None)
