"""Patterns of the kept blocks of a block-sparse score matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from distributed_kernels.errors import KernelError

PATTERNS = ("local", "strided", "global")


class KeptBlocks(NamedTuple):
    """Kept blocks of a score matrix.

    Attributes:
        mask: bool (query blocks, key blocks) or (heads, query blocks, key blocks), True where one is kept.
        block_size: positions of a block; the last of a side may be short.
        causal: row i sees columns 0..i.
    """

    mask: Tensor
    block_size: int
    causal: bool

    def pairs(self, queries: int, keys: int) -> Tensor:
        """bool, (queries, keys) or (heads, queries, keys): True where a row sees a column."""
        sides = (torch.arange(length, device=self.mask.device) for length in (queries, keys))
        rows, columns = sides
        seen = self.mask[..., rows[:, None] // self.block_size, columns // self.block_size]
        return seen & (columns <= rows[:, None]) if self.causal else seen


def block_pattern(
    pattern: str,
    length: int,
    *,
    block_size: int = 64,
    sparsity_ratio: float = 0.1,
    causal: bool = False,
) -> Tensor:
    """The blocks that a pattern keeps, as near to the share asked for as a whole number of blocks allows.

    ``local`` keeps the nearest blocks of each query block, ``strided`` evenly spaced ones, ``global`` the
    first blocks of the sequence as keys for all and as queries of all. Every query block keeps itself, so
    that no query is left without a key. Names joined by ``+`` keep what any of them keeps.
    `block_density` returns the resulting share.

    Args:
        pattern: ``local``, ``strided``, ``global``, or several joined by ``+``.
        length: positions of the sequence; the last block may be short.
        block_size: positions of a block.
        sparsity_ratio: share of the blocks to keep (of those on and below the diagonal when causal).
        causal: keep nothing above the diagonal.

    Returns:
        bool (blocks, blocks), queries by keys, blocks = ceil(length / block_size), on the CPU.

    Raises:
        KernelError: an unknown name, a ratio outside (0, 1], or a block size below 1.
    """
    check_pattern(pattern, block_size, sparsity_ratio)
    return _pattern(tuple(pattern.split("+")), -(-length // block_size), sparsity_ratio, causal).clone()


def block_density(mask: Tensor, *, causal: bool = False) -> float:
    """Share of the blocks of `mask` (..., blocks, blocks) kept: of the causal triangle when `causal`."""
    allowed = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    allowed = allowed.tril() if causal else allowed
    total = allowed.expand(mask.shape).sum()
    return float((mask & allowed).sum() / total.clamp(min=1))


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...], blocks: int, ratio: float, causal: bool) -> Tensor:
    """The union over `names`, each with the budget that brings the union nearest to `ratio`."""

    def kept(budget: float) -> Tensor:
        masks = [_BUILD[name](blocks, budget, causal) for name in names]
        union = torch.stack(masks).any(0) | torch.eye(blocks, dtype=torch.bool)
        return union.tril() if causal else union

    if blocks == 0:
        return torch.zeros(0, 0, dtype=torch.bool)
    budgets = [per_row / (2 * blocks) for per_row in range(2 * blocks + 1)]
    return kept(_nearest(budgets, ratio, lambda budget: block_density(kept(budget), causal=causal)))


def _nearest(budgets: list[float], ratio: float, density: Callable[[float], float]) -> float:
    """The budget whose density is nearest to `ratio`, by bisection: density grows with the budget."""
    low, high = 0, len(budgets) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if density(budgets[middle]) <= ratio else (low, middle)
    return min(budgets[low], budgets[high], key=lambda budget: abs(density(budget) - ratio))


def _distance(blocks: int) -> Tensor:
    """(queries, keys): number of blocks by which the key precedes the query."""
    place = torch.arange(blocks)
    return place[:, None] - place[None, :]


def _local(blocks: int, budget: float, causal: bool) -> Tensor:
    """The `budget * blocks` nearest key blocks of each row, shifted inwards at the ends."""
    distance = _distance(blocks)
    kept = round(budget * blocks)
    if causal:
        return (distance >= 0) & (distance < kept)
    first = (torch.arange(blocks) - kept // 2).clamp(min=0, max=blocks - kept)[:, None]
    place = torch.arange(blocks)[None, :]
    return (place >= first) & (place < first + kept)


def _strided(blocks: int, budget: float, causal: bool) -> Tensor:
    """Evenly spaced key blocks, counted back from the query's own: floor(budget * distance) grows there."""
    distance = _distance(blocks).abs()
    steps: Tensor = torch.floor((distance + 1) * budget) - torch.floor(distance * budget)
    return steps > 0


def _global(blocks: int, budget: float, causal: bool) -> Tensor:
    """The first blocks' columns and rows: g of them keep 1 - (1 - g/blocks)^2 of all."""
    first = torch.arange(blocks) < round((1 - (1 - budget) ** 0.5) * blocks)
    either: Tensor = first[:, None] | first[None, :]
    return either


_BUILD: dict[str, Callable[[int, float, bool], Tensor]] = {
    "local": _local,
    "strided": _strided,
    "global": _global,
}


def check_pattern(pattern: str, block_size: int, ratio: float) -> None:
    """Raise unless `block_pattern` takes these.

    Raises:
        KernelError: names the one that it does not take.
    """
    if any(name not in PATTERNS for name in pattern.split("+")):
        raise KernelError(
            "pattern: unknown pattern",
            got=pattern,
            allowed=", ".join(PATTERNS) + ", or several joined by +",
            remedy="For blocks of your own choice give mask=",
        )
    if block_size < 1:
        raise KernelError("block_size: must be positive", got=block_size, allowed="1 and more")
    if not 0 < ratio <= 1:
        raise KernelError(
            "sparsity_ratio: not a share of blocks to keep",
            got=ratio,
            allowed="above 0, at most 1",
            remedy="0.1 keeps a tenth of the blocks",
        )
