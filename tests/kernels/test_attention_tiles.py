"""The fused kernel's form of a mask of blocks sees the pairs of the mask, and no others.

The kernel itself needs a GPU: rows `kernel/block-sparse` of tests/gpu.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from distributed_kernels import documents, sliding_window
from distributed_kernels.attention import block_kernels_flex
from distributed_kernels.attention.block_kernels_flex import attend
from distributed_kernels.attention.block_kernels_reference import Block
from distributed_kernels.attention.patterns import KeptBlocks
from distributed_kernels.attention.tile_masks import mask_tiles, pair_tiles, pattern_tiles, tile_mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import oracles

CASES = [
    # positions, block, heads with masks of their own (0: one mask)
    (256, 64, 0),
    (192, 128, 0),
    (300, 256, 2),
    (320, 32, 3),
    (200, 64, 0),  # a short last block
    (190, 100, 2),  # an edge inside a tile
    (150, 7, 0),
    (64, 64, 0),
    (1, 64, 0),
]


def listed(number: Tensor, indices: Tensor) -> Tensor:
    """How often each tile is listed: (heads, rows of tiles, columns of tiles)."""
    places = torch.arange(indices.shape[-1])
    count = torch.zeros(indices.shape, dtype=torch.float64)
    count.scatter_add_(-1, indices.long(), (places < number.unsqueeze(-1)).double())
    return count[0]


def seen_pairs(tiles: BlockMask, rows: int, columns: int) -> Tensor:
    """(heads, rows, columns): 1 where the kernel sees the pair, by the definition of a `BlockMask`."""

    def pairs(number: Tensor | None, indices: Tensor | None) -> Tensor:
        assert number is not None
        assert indices is not None
        found = listed(number, indices)
        for dim in (1, 2):
            found = found.repeat_interleave(tiles.BLOCK_SIZE[dim - 1], dim)
        return found[:, :rows, :columns]

    heads = torch.arange(tiles.kv_num_blocks.shape[1])[:, None, None]
    tested = tiles.mask_mod(torch.tensor(0), heads, torch.arange(rows)[:, None], torch.arange(columns))
    whole = pairs(tiles.full_kv_num_blocks, tiles.full_kv_indices)
    return pairs(tiles.kv_num_blocks, tiles.kv_indices) * tested + whole


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block_size", "heads"), CASES)
def test_tiles_see_the_pairs_of_the_mask(
    length: int, block_size: int, heads: int, causal: bool, size: int
) -> None:
    torch.manual_seed(length)
    blocks = -(-length // block_size)
    mask = torch.rand((heads, blocks, blocks) if heads else (blocks, blocks)) < 0.4
    tiles = tile_mask(KeptBlocks(mask, block_size, causal), length, length, size)
    wanted = oracles.block_counts(mask, length, block_size, causal=causal)
    assert torch.equal(seen_pairs(tiles, length, length), wanted.expand(max(heads, 1), length, length))


@pytest.mark.parametrize(("pattern", "size"), [("local", 128), ("global", 128), ("strided", 64)])
def test_small_tiles_where_large_ones_would_compute_much_in_vain(pattern: str, size: int) -> None:
    tiles = pattern_tiles(pattern, 4096, 64, 0.1, True, torch.device("cpu"))
    assert tiles.BLOCK_SIZE[0] == size
    # Tiles that divide the blocks are whole but for the diagonal, so that no pair is tested elsewhere.
    if size == 64:
        assert tiles.kv_num_blocks.tolist() == [[[1] * 64]]
        assert tiles.kv_indices[0, 0, :, 0].tolist() == list(range(64))


STEP_BY_STEP = [
    # positions, block, heads with masks of their own, causal, heads share keys and values
    (320, 32, 3, True, False),
    (190, 100, 2, False, True),
    (150, 7, 0, True, True),
    (1, 64, 0, False, False),
]


@pytest.mark.parametrize(("length", "block_size", "heads", "causal", "shared"), STEP_BY_STEP)
def test_the_kernel_step_by_step_against_the_oracle(
    length: int, block_size: int, heads: int, causal: bool, shared: bool
) -> None:
    """Heads may share keys and values; a row without a key has out 0 and lse -inf."""
    torch.manual_seed(length)
    query_heads = heads or 2
    blocks = -(-length // block_size)
    mask = torch.rand((heads, blocks, blocks) if heads else (blocks, blocks)) < 0.4
    q = torch.randn(2, query_heads, length, 16, dtype=torch.float64)
    k, v = (torch.randn(2, 1 if shared else query_heads, length, 16, dtype=torch.float64) for _ in range(2))
    tiles = tile_mask(KeptBlocks(mask, block_size, causal), length, length)
    out, lse = attend(q, k, v, tiles, 0.25)
    count = oracles.block_counts(mask, length, block_size, causal=causal)
    every = (x.expand(2, query_heads, length, 16) for x in (k, v))
    wanted, wanted_lse = oracles.weighted_attention_with_lse(q, *every, count, 0.25)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-6)  # kept in float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("before", "after"), [(None, None), (0, 0), (130, 5), (None, 0), (7, None)])
@pytest.mark.parametrize("lengths", [[300], [1, 128, 171], [64, 64, 64]])
def test_tiles_see_the_pairs_of_windows_and_documents(
    lengths: list[int], before: int | None, after: int | None, causal: bool
) -> None:
    pattern = documents(lengths) & sliding_window(sum(lengths), before, after)
    tiles = pair_tiles(pattern.causal() if causal else pattern, torch.device("cpu"))
    wanted = oracles.window_counts(lengths, before, after, causal=causal)
    assert torch.equal(seen_pairs(tiles, sum(lengths), sum(lengths))[0], wanted)


# -- a part of a larger softmax ------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, kept: KeptBlocks, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel's signature by the oracle."""
    count = kept.pairs(q.shape[2], k.shape[2])
    return oracles.weighted_attention_with_lse(q, k, v, count, scale)


def test_two_parts_give_the_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from its own keys, the whole output and the whole lse; one row has keys in neither part."""
    monkeypatch.setattr(block_kernels_flex, "attend", plain)
    monkeypatch.setattr(block_kernels_flex, "_tiles_of", lambda block: block.kept)
    torch.manual_seed(0)
    mask = torch.rand(6, 12) < 0.5
    mask[2] = False
    q, k, v, dout = (torch.randn(1, 2, length, 4, dtype=torch.float64) for length in (24, 48, 48, 24))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, KeptBlocks(mask, 4, False), 0.5)
    wanted = torch.autograd.grad(out, leaves, dout)
    whole = lse.detach().masked_fill(lse == -torch.inf, torch.inf)
    found = []
    for half in (slice(0, 24), slice(24, 48)):
        kept = KeptBlocks(mask[:, half.start // 4 : half.stop // 4], 4, False)
        part = Block(q, k[:, :, half], v[:, :, half], False, 0.5, kept=kept)
        found.append(block_kernels_flex.backward(part, dout, out.detach(), whole))
    (dq, dk, dv), (other_dq, other_dk, other_dv) = found
    together = (dq + other_dq, torch.cat((dk, other_dk), 2), torch.cat((dv, other_dv), 2))
    for mine, theirs in zip(together, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# -- cost ----------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts operators, and refuses those that read a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket._qualified_op_name not in READS
        self.number += 1
        return function(*args, **(kwargs or {}))


READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


@pytest.mark.parametrize("block_size", [64, 100])
def test_the_work_on_a_mask_does_not_grow_with_its_blocks(block_size: int) -> None:
    numbers = []
    for blocks in (4, 40):
        kept = KeptBlocks(torch.rand(2, blocks, blocks) < 0.5, block_size, True)
        with Counted() as counted:
            tile_mask(kept, blocks * block_size, blocks * block_size)
        numbers.append(counted.number)
    assert numbers[0] == numbers[1] < 120


def test_tiles_of_an_evaluation_serve_training() -> None:
    """Autograd saves no tensor that was made under `torch.inference_mode`."""
    place, mask = torch.device("cpu"), torch.ones(3, 3, dtype=torch.bool)
    with torch.inference_mode():
        pattern_tiles("local", 192, 64, 0.34, True, place)
        mask_tiles(mask, 192, 64, False, place)
        pair_tiles(sliding_window(192, 21), place)
    found = (
        pattern_tiles("local", 192, 64, 0.34, True, place),
        mask_tiles(mask, 192, 64, False, place),
        pair_tiles(sliding_window(192, 21), place),
    )
    for tiles in found:
        assert not tiles.kv_indices.is_inference()
        assert not tiles.kv_num_blocks.is_inference()


def test_a_mask_that_is_given_again_costs_nothing() -> None:
    mask, place = torch.ones(4, 4, dtype=torch.bool), torch.device("cpu")
    first = mask_tiles(mask, 512, 128, False, place)
    with Counted() as counted:
        assert mask_tiles(mask, 512, 128, False, place) is first
    assert counted.number == 0
    mask[0, 3] = False
    again = mask_tiles(mask, 512, 128, False, place)
    assert again.full_kv_num_blocks.tolist() == [[[3, 4, 4, 4]]]
    assert first.full_kv_num_blocks.tolist() == [[[4, 4, 4, 4]]]
    gone = weakref.ref(again)
    del mask, first, again
    gc.collect()
    assert gone() is None
