"""Masks of blocks in the form that torch's flex attention reads: lists of tiles, written on the device.

Nothing here reads a value of the device on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from distributed_kernels.attention.pair_patterns import PairPattern
from distributed_kernels.attention.patterns import KeptBlocks, block_pattern

LARGEST_TILE, _SMALLEST = 128, 32
"""Rows of a tile; the largest is computed with the best share of the device's peak."""
_WORTH = 2.0
"""Smaller tiles are chosen where the largest ones compute this many times as many pairs."""


def tile_mask(kept: KeptBlocks, queries: int, keys: int, size: int = LARGEST_TILE) -> BlockMask:
    """The kernel's form of `kept`, on the device of its mask.

    Args:
        kept: blocks of `queries` rows by `keys` columns.
        queries: rows; the last block may be short.
        keys: columns; the last block may be short.
        size: rows and columns of a tile.

    Returns:
        Tiles whose every pair is seen, and tiles whose pairs are tested one by one: those on the diagonal,
        and those that cover several blocks of which not all are kept.
    """
    mask = kept.mask if kept.mask.dim() == 3 else kept.mask.unsqueeze(0)
    some, every = _seen(kept, queries, keys, size)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=(size, size),
        mask_mod=_test(kept, mask),
        seq_lengths=(queries, keys),
    )


def tile_size(kept: KeptBlocks, queries: int, keys: int) -> int:
    """The largest tile; or, for a mask whose values the host has, a smaller one that divides the blocks and
    leaves out enough pairs that the largest would compute for nothing."""
    power = kept.block_size & -kept.block_size
    if kept.mask.device.type != "cpu" or not _SMALLEST <= power < LARGEST_TILE:
        return LARGEST_TILE
    large, small = (
        int(_seen(kept, queries, keys, size)[0].sum()) * size**2 for size in (LARGEST_TILE, power)
    )
    return power if large > _WORTH * small else LARGEST_TILE


class _Tiles(NamedTuple):
    """Positions and blocks that each tile of one side covers, both ends inclusive."""

    first_position: Tensor
    last_position: Tensor
    first_block: Tensor
    last_block: Tensor


def _tiles(length: int, size: int, block_size: int, device: torch.device) -> _Tiles:
    first = torch.arange(0, length, size, device=device)
    last = (first + size - 1).clamp(max=length - 1)
    return _Tiles(first, last, first // block_size, last // block_size)


def _seen(kept: KeptBlocks, queries: int, keys: int, size: int) -> tuple[Tensor, Tensor]:
    """(a pair of the tile is seen, all of them are), (heads or 1, rows of tiles, columns of tiles)."""
    device = kept.mask.device
    rows, columns = (_tiles(length, size, kept.block_size, device) for length in (queries, keys))
    sums = torch.nn.functional.pad(kept.mask.int().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
    sums = sums if sums.dim() == 3 else sums.unsqueeze(0)
    top, bottom = rows.first_block, rows.last_block + 1
    left, right = columns.first_block, columns.last_block + 1
    bands = sums[:, bottom] - sums[:, top]
    blocks = bands[..., right] - bands[..., left]
    some, every = blocks > 0, blocks == (bottom - top)[:, None] * (right - left)
    if kept.causal:
        some = some & (columns.first_position <= rows.last_position[:, None])
        every = every & (columns.last_position <= rows.first_position[:, None])
    return some, every


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(number of kept tiles of each row, their columns in order, then the others)."""
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32).unsqueeze(0), order.to(torch.int32).unsqueeze(0)


def _test(kept: KeptBlocks, mask: Tensor) -> Callable[..., Tensor]:
    """The test of one pair.

    The fused kernel asks it in partial tiles only; flex attention computed step by step asks it for every
    pair and reads no tiles, so that the diagonal alone would not do.
    """
    size, causal, own = kept.block_size, kept.causal, mask.shape[0] > 1

    def is_seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        seen = mask[head if own else 0, row // size, column // size]
        return seen & (row >= column) if causal else seen

    return is_seen


@lru_cache(maxsize=32)
def pattern_tiles(
    pattern: str, length: int, block_size: int, sparsity_ratio: float, causal: bool, device: torch.device
) -> BlockMask:
    """`tile_mask` of a `block_pattern`, kept from call to call."""
    mask = block_pattern(pattern, length, block_size=block_size, sparsity_ratio=sparsity_ratio, causal=causal)
    return _tiles_on(device, KeptBlocks(mask, block_size, causal), length)


@torch.inference_mode(False)  # a kept tensor of that mode could not be saved for a later backward
def _tiles_on(device: torch.device, kept: KeptBlocks, length: int) -> BlockMask:
    # A copy, because tiles that held the caller's mask itself would keep it alive.
    own = kept._replace(mask=kept.mask.detach().to(device, copy=True))
    return tile_mask(own, length, length, tile_size(kept, length, length))


_of_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Mask -> (its version, the other arguments, tiles); a mask is mostly a buffer, given again at every step."""


def mask_tiles(mask: Tensor, length: int, block_size: int, causal: bool, device: torch.device) -> BlockMask:
    """`tile_mask` of a caller's mask, kept as long as the mask lives and is not written to."""
    kept = KeptBlocks(mask, block_size, causal)
    if mask.is_inference():  # has no version
        return _tiles_on(device, kept, length)
    key = mask._version, length, block_size, causal, device
    found = _of_masks.get(mask)
    if found is None or found[0] != key:
        found = key, _tiles_on(device, kept, length)
        _of_masks[mask] = found
    tiles: BlockMask = found[1]
    return tiles


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # as of `_tiles_on`
def pair_tiles(pattern: PairPattern, device: torch.device) -> BlockMask:
    """The kernel's form of a window or of documents, kept for the layers and steps that share a pattern."""
    every, partial = (tiles.unsqueeze(0).to(device) for tiles in pattern.blocks(LARGEST_TILE))
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(every),
        BLOCK_SIZE=(LARGEST_TILE, LARGEST_TILE),
        mask_mod=pattern.mask_mod(device),
        seq_lengths=(pattern.length, pattern.length),
    )
