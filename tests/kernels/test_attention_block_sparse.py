"""Block-sparse attention is one softmax over the kept blocks, and patterns keep what they are asked to."""

from __future__ import annotations

import pytest
import torch
from distributed_kernels import (
    KernelError,
    attention_with_lse,
    block_density,
    block_pattern,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
    use_blocks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.attention_support import BOUNDS, assert_matches, errors, inputs

bounded = settings(max_examples=40, deadline=None, derandomize=True)
NAMES = ["local", "strided", "global", "local+strided", "local+global", "local+strided+global"]
causal_or_not = pytest.mark.parametrize("causal", [False, True])


@pytest.mark.slow
@bounded
@given(
    length=st.integers(1, 30),
    block_size=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    heads=st.integers(1, 3),
    own_masks=st.booleans(),
    causal=st.booleans(),
    dtype=st.sampled_from(list(BOUNDS)),
    blocks=st.sampled_from(["plain", "cpu-flash"]),
)
def test_any_mask_against_the_oracle(
    length: int,
    block_size: int,
    density: float,
    heads: int,
    own_masks: bool,
    causal: bool,
    dtype: torch.dtype,
    blocks: str,
) -> None:
    torch.manual_seed(length)
    size = -(-length // block_size)
    mask = torch.rand((heads, size, size) if own_masks else (size, size)) < density
    count = oracles.block_counts(mask, length, block_size, causal=causal)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, mask=mask, block_size=block_size, causal=causal)

    with use_blocks(blocks):
        assert_matches(
            function,
            lambda q, k, v: oracles.weighted_attention(q, k, v, count),
            inputs(2, heads, length, 4, dtype=dtype),
        )


@pytest.mark.slow
@causal_or_not
@pytest.mark.parametrize("pattern", NAMES)
def test_patterns_against_the_oracle(pattern: str, causal: bool) -> None:
    mask = block_pattern(pattern, 50, block_size=4, sparsity_ratio=0.3, causal=causal)
    count = oracles.block_counts(mask, 50, 4, causal=causal)
    options = {"pattern": pattern, "block_size": 4, "sparsity_ratio": 0.3, "causal": causal}
    assert_matches(
        lambda q, k, v: block_sparse_attention(q, k, v, **options),
        lambda q, k, v: oracles.weighted_attention(q, k, v, count),
        inputs(1, 2, 50, 8),
    )


@causal_or_not
@pytest.mark.parametrize("pattern", NAMES)
def test_patterns_keep_the_share_asked_for(pattern: str, causal: bool) -> None:
    """Within what one more key block for every row would add, or one more global one."""
    blocks = 64
    for ratio in (0.1, 0.25, 0.5, 1.0):
        mask = block_pattern(pattern, blocks * 8, block_size=8, sparsity_ratio=ratio, causal=causal)
        one_more = (2 if causal or "global" in pattern else 1) * len(pattern.split("+")) / blocks
        assert abs(block_density(mask, causal=causal) - ratio) <= one_more / 2, ratio
        assert mask.diagonal().all()
        assert not (causal and mask.triu(1).any())


def test_what_the_patterns_look_like() -> None:
    def lines(pattern: str, causal: bool) -> list[str]:
        mask = block_pattern(pattern, 6, block_size=1, sparsity_ratio=0.5, causal=causal)
        return ["".join("#" if kept else "." for kept in row) for row in mask.tolist()]

    assert lines("local", False) == ["###...", "###...", ".###..", "..###.", "...###", "...###"]
    assert lines("local", True) == ["#.....", "##....", ".##...", "..##..", "...##.", "....##"]
    assert lines("strided", False) == ["#.#.#.", ".#.#.#", "#.#.#.", ".#.#.#", "#.#.#.", ".#.#.#"]
    assert lines("global", True) == ["#.....", "##....", "#.#...", "#..#..", "#...#.", "#....#"]


def test_every_block_is_dense_attention() -> None:
    qkv = inputs(1, 2, 20, 4)
    out = block_sparse_attention(*qkv, sparsity_ratio=1.0, block_size=6, causal=True)
    assert torch.allclose(out, attention_with_lse(*qkv, causal=True)[0], rtol=0, atol=1e-14)


def test_the_future_moves_the_past_by_exactly_nothing() -> None:
    q, k, v = (x.detach() for x in inputs(1, 2, 40, 8))
    options = {"pattern": "local+global", "block_size": 8, "sparsity_ratio": 0.5, "causal": True}
    before = block_sparse_attention(q, k, v, **options)
    for now in (1, 13, 39):
        later = [torch.cat((x[:, :, :now], torch.randn_like(x[:, :, now:]) * 9), 2) for x in (q, k, v)]
        after = block_sparse_attention(*later, **options)
        assert torch.equal(after[:, :, :now], before[:, :, :now])


@pytest.mark.slow
def test_gradcheck() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, block_size=3, sparsity_ratio=0.5, causal=True)

    assert torch.autograd.gradcheck(function, inputs(1, 2, 8, 4))


def a_triangle_in_every_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What comes of handing is_causal to the attention of each block."""
    count = oracles.block_counts(torch.ones(4, 4).tril(), 16, 4)
    return oracles.weighted_attention(q, k, v, count * torch.ones(4, 4).tril().repeat(4, 4))


def softmax_of_each_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def block(i: int, j: int) -> Tensor:
        keys, values = k[:, :, j : j + 4], v[:, :, j : j + 4]
        return oracles.weighted_attention(q[:, :, i : i + 4], keys, values, torch.ones(4, 4))

    parts = [block(i, j) for i in range(0, 16, 4) for j in range(0, i + 1, 4)]
    rows = [sum(parts[first : first + n], torch.zeros(())) for n, first in ((1, 0), (2, 1), (3, 3), (4, 6))]
    return torch.cat(rows, 2)


@pytest.mark.parametrize("broken", [a_triangle_in_every_block, softmax_of_each_block])
def test_broken_forms_are_seen(broken: object) -> None:
    assert callable(broken)
    count = oracles.block_counts(torch.ones(4, 4), 16, 4, causal=True)
    found = errors(broken, lambda q, k, v: oracles.weighted_attention(q, k, v, count), inputs(1, 2, 16, 4))
    assert found[0] > 0.01


@causal_or_not
@pytest.mark.parametrize("branches", [[(7, 1), (20, 2)], [(8, 1), (16, 2), (64, 4)], [(20, 3)]])
def test_dilated_blocks_against_the_oracle(branches: list[tuple[int, int]], causal: bool) -> None:
    options = {"pattern": "local+global", "block_size": 2, "sparsity_ratio": 0.5, "causal": causal}

    def kept(rows: int) -> Tensor:
        return block_pattern("local+global", rows, block_size=2, sparsity_ratio=0.5, causal=causal)

    count = oracles.dilated_block_counts(20, 4, branches, kept, 2, causal=causal)
    assert_matches(
        lambda q, k, v: block_sparse_dilated_attention(q, k, v, *zip(*branches, strict=True), **options),
        lambda q, k, v: oracles.weighted_attention(q, k, v, count),
        inputs(2, 4, 20, 4),
    )


def test_dilated_blocks_between_their_two_ends() -> None:
    qkv = inputs(1, 4, 32, 4)
    whole = block_sparse_dilated_attention(*qkv, [8, 32], [1, 2], sparsity_ratio=1.0, block_size=4)
    assert torch.allclose(whole, dilated_attention(*qkv, [8, 32], [1, 2]), rtol=0, atol=1e-14)
    undilated = block_sparse_dilated_attention(*qkv, [32], [1], sparsity_ratio=0.4, block_size=4)
    plain = block_sparse_attention(*qkv, sparsity_ratio=0.4, block_size=4)
    assert torch.allclose(undilated, plain, rtol=0, atol=1e-14)


def test_bad_input() -> None:
    q, k, v = inputs(1, 2, 20, 4)
    with pytest.raises(KernelError, match=r"pattern: unknown pattern.*'diagonal'.*local, strided, global"):
        block_sparse_attention(q, k, v, pattern="diagonal")
    with pytest.raises(KernelError, match=r"sparsity_ratio.*Got 1.5"):
        block_sparse_attention(q, k, v, sparsity_ratio=1.5)
    with pytest.raises(KernelError, match=r"block_size.*Got 0"):
        block_sparse_attention(q, k, v, block_size=0)
    with pytest.raises(KernelError, match=r"mask: .*Got \(4, 4\).*\(5, 5\) or \(2, 5, 5\)"):
        block_sparse_attention(q, k, v, mask=torch.ones(4, 4, dtype=torch.bool), block_size=4)
    with pytest.raises(KernelError, match=r"mask: must be boolean.*float32"):
        block_sparse_attention(q, k, v, mask=torch.ones(5, 5), block_size=4)
