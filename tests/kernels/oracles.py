"""Attention by its definition, in float64, with loops that a reader can believe.

Nothing here is fast, and nothing is shared with the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_attention(q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale + log count) v; a query all of whose counts are 0 gives 0."""
    return weighted_attention_with_lse(q, k, v, count, scale)[0]


def weighted_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As above, and the logarithm of the denominator. `count` broadcasts to (batch, heads, N, M)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    count = count.to(scores.dtype).expand(scores.shape)
    has_key = count.sum(-1, keepdim=True) > 0
    # The largest score of a query comes off before exp; it changes nothing but the range.
    peak = scores.masked_fill(count == 0, -torch.inf).amax(-1, keepdim=True)
    peak = torch.where(has_key, peak, 0.0).detach()
    weights = count * torch.exp(torch.where(count > 0, scores - peak, 0.0))
    total = torch.where(has_key, weights.sum(-1, keepdim=True), 1.0)
    out = torch.einsum("bhij,bhjd->bhid", weights / total, v)
    lse = torch.where(has_key, peak + torch.log(total), -torch.inf).squeeze(-1)
    return out, lse


def dilated_counts(
    length: int,
    heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    causal: bool = False,
    grouped: bool = False,
) -> Tensor:
    """C[h, i, j]: in how many branches head h keeps both i and j in one segment (LongNet, section 3.2).

    `grouped`: neighbouring heads share an offset, of which there are as many as the rate.
    """
    count = torch.zeros(heads, length, length, dtype=torch.float64)
    for width, rate in zip(segment_lengths, dilation_rates, strict=True):
        for head in range(heads):
            offset = head // -(-heads // rate) if grouped else head % rate
            for start in range(0, length, width):
                end = min(start + width, length)
                kept = [i for i in range(start, end) if (i - start) % rate == offset]
                for i in kept:
                    for j in kept:
                        if j <= i or not causal:
                            count[head, i, j] += 1
    return count


def window_counts(
    lengths: Sequence[int], before: int | None, after: int | None, *, causal: bool = False
) -> Tensor:
    """0/1 for each pair of positions of documents in a row: in one document, within the window."""
    length = sum(lengths)
    owner = [number for number, size in enumerate(lengths) for _ in range(size)]
    count = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        for j in range(length):
            near = (before is None or i - j <= before) and (after is None or j - i <= after)
            count[i, j] = float(near and owner[i] == owner[j] and (j <= i or not causal))
    return count


def block_counts(mask: Tensor, length: int, block_size: int, *, causal: bool = False) -> Tensor:
    """0/1 for each pair of positions, from a mask of blocks (..., blocks, blocks)."""
    count = torch.zeros(*mask.shape[:-2], length, length, dtype=torch.float64)
    for i in range(length):
        for j in range(length):
            if j <= i or not causal:
                count[..., i, j] = mask[..., i // block_size, j // block_size].double()
    return count


def dilated_block_counts(
    length: int,
    heads: int,
    branches: Sequence[tuple[int, int]],
    kept_blocks: object,
    block_size: int,
    *,
    causal: bool = False,
) -> Tensor:
    """`dilated_counts` restricted, within what each segment keeps, to the blocks of a mask.

    `kept_blocks(rows)` is the mask of blocks for a segment that keeps so many rows.
    """
    assert callable(kept_blocks)
    count = torch.zeros(heads, length, length, dtype=torch.float64)
    for width, rate in branches:
        for head in range(heads):
            for start in range(0, length, width):
                end = min(start + width, length)
                kept = [i for i in range(start, end) if (i - start) % rate == head % rate]
                mask = kept_blocks(len(kept))
                for a, i in enumerate(kept):
                    for b, j in enumerate(kept):
                        if mask[a // block_size, b // block_size] and (j <= i or not causal):
                            count[head, i, j] += 1
    return count
