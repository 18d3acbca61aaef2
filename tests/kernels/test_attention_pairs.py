"""Windows and documents, exact to the pair: values and gradients, layouts of blocks, number of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_kernels import (
    KernelError,
    PairPattern,
    attention_with_lse,
    documents,
    pattern_attention,
    sliding_window,
    use_blocks,
)
from distributed_kernels.attention.pattern_attention import pattern_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels import oracles
from tests.kernels.attention_support import BOUNDS, assert_matches, errors, inputs

bounded = settings(max_examples=80, deadline=None, derandomize=True)
limits = st.one_of(st.none(), st.integers(0, 60))
CPU = torch.device("cpu")


def count_of(lengths: list[int], before: int | None, after: int | None, causal: bool) -> Tensor:
    return oracles.window_counts(lengths, before, after, causal=causal)


def pattern_of(lengths: list[int], before: int | None, after: int | None) -> PairPattern:
    return documents(lengths) & sliding_window(sum(lengths), before, after)


@bounded
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    before=limits,
    after=limits,
    causal=st.booleans(),
    blocks=st.sampled_from(["plain", "cpu-flash"]),
    dtype=st.sampled_from(list(BOUNDS)),
)
def test_against_the_oracle(
    lengths: list[int],
    before: int | None,
    after: int | None,
    causal: bool,
    blocks: str,
    dtype: torch.dtype,
) -> None:
    count, pattern = count_of(lengths, before, after, causal), pattern_of(lengths, before, after)
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: pattern_attention(q, k, v, pattern, causal=causal),
            lambda q, k, v: oracles.weighted_attention(q, k, v, count),
            inputs(1, 2, sum(lengths), 4, dtype=dtype),
        )


@bounded
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    before=limits,
    after=limits,
    block_size=st.integers(1, 20),
)
def test_blocks_by_counting_their_pairs(
    lengths: list[int], before: int | None, after: int | None, block_size: int
) -> None:
    pattern, length = pattern_of(lengths, before, after), sum(lengths)
    count = count_of(lengths, before, after, False)
    place = torch.arange(length)
    assert torch.equal(pattern.pairs(place, place), count > 0)
    full, partial = pattern.blocks(block_size)
    assert not (full & partial).any()
    for a, rows in enumerate(count.split(block_size, 0)):
        for b, block in enumerate(rows.split(block_size, 1)):
            assert full[a, b] == bool((block > 0).all())
            if not full[a, b] and not partial[a, b]:
                assert (block == 0).all()
            if partial[a, b] and (len(lengths) == 1 or before is after is None):
                assert (block > 0).any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_layout_is_what_flex_attention_takes() -> None:
    """The block mask from (full, partial) and `mask_mod` is torch's own of the same function."""
    pattern, block = documents([20, 50, 26]) & sliding_window(96, 24, 3), 16
    full, partial = pattern.blocks(block)
    made = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=block,
        mask_mod=pattern.mask_mod(),
        seq_lengths=(96, 96),
    )
    assert torch.equal(made.to_dense()[0, 0] > 0, full | partial)
    place = torch.arange(96)
    mask = create_mask(pattern.mask_mod(), 1, 1, 96, 96, device="cpu")
    assert torch.equal(mask[0, 0], pattern.pairs(place, place))
    q, k, v = (x.detach().float() for x in inputs(1, 2, 96, 16))
    mine, theirs = pattern_attention(q, k, v, pattern), flex_attention(q, k, v, block_mask=made)
    assert isinstance(theirs, Tensor)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def _ordered(kept: Tensor) -> tuple[Tensor, Tensor]:
    """(number, order) of the kept key blocks of each query block, as int32 of (1, 1, ...)."""
    order = kept.int().argsort(dim=-1, descending=True, stable=True)
    return kept.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


@pytest.mark.parametrize(("before", "after", "causal"), [(5, 0, False), (20, 7, False), (None, 3, True)])
def test_shared_heads_and_dropout_of_nothing(before: int | None, after: int, causal: bool) -> None:
    mask = count_of([40], before, after, causal) > 0
    pattern = sliding_window(40, before, after)
    qkv = [*inputs(2, 4, 40, 8, count=1), *inputs(2, 2, 40, 8, count=2)]
    assert_matches(
        lambda q, k, v: pattern_attention(q, k, v, pattern, causal=causal),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        qkv,
    )


def test_a_window_is_not_one_wider() -> None:
    """The oracle sees a window that is off by one, at either edge."""
    qkv = inputs(1, 1, 48, 4)
    for wrong in (sliding_window(48, 6, 2), sliding_window(48, 5, 3), sliding_window(48, 4, 2)):
        found = errors(
            lambda q, k, v, wrong=wrong: pattern_attention(q, k, v, wrong),
            lambda q, k, v: oracles.weighted_attention(q, k, v, count_of([48], 5, 2, False)),
            qkv,
        )
        assert min(found) > 1e-3


def test_documents_are_attention_on_each() -> None:
    q, k, v = (x.detach() for x in inputs(1, 2, 30, 4))
    lengths = [7, 7, 0, 16]
    mine = pattern_attention(q, k, v, documents(torch.tensor(lengths)), causal=True)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    theirs = [attention_with_lse(*part, causal=True)[0] for part in parts if part[0].shape[2]]
    assert torch.allclose(mine, torch.cat(theirs, 2), rtol=0, atol=1e-14)


def test_calls_do_not_grow_with_the_length() -> None:
    def pieces(pattern: PairPattern) -> int:
        return len(list(pattern_pieces(pattern, CPU)))

    assert pieces(sliding_window(4096, 256)) == pieces(sliding_window(65536, 256)) <= 6
    assert pieces(documents([64] * 100).causal()) == 1
    assert pieces(documents([64, 32] * 10)) == 20
    assert pieces(sliding_window(100, None, None)) == pieces(sliding_window(100, 99)) == 1


def test_pieces_hold_each_pair_once() -> None:
    for pattern in (sliding_window(100, 20, 9), documents([33, 67]) & sliding_window(100, 40)):
        seen = torch.zeros(100, 100)
        place = torch.arange(100)[None, None]
        for piece in pattern_pieces(pattern, CPU):
            rows, columns = (view.gather(place)[0, 0] for view in (piece.queries, piece.keys))
            mask = torch.ones(rows.shape[1], columns.shape[1]) if piece.mask is None else piece.mask.float()
            mask = mask.tril() if piece.causal else mask
            for row, column in zip(rows, columns, strict=True):
                seen[row[:, None], column] += mask
        assert torch.equal(seen, pattern.pairs(torch.arange(100), torch.arange(100)).float())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sliding_window(8, -1), "before: .*flash-attn's -1 is None here"),
        (lambda: documents([3, -1]), r"lengths: .*Got \[3, -1\]"),
        (lambda: documents(torch.tensor([1.5])), "whole numbers"),
        (lambda: documents([0, 4, 9]), r"cu_seqlens\.diff\(\)"),
        (lambda: documents([8]) & documents([9]), "of other lengths"),
        (lambda: documents([8]).blocks(0), "block_size: must be positive"),
        (lambda: pattern_attention(*inputs(1, 2, 8, 4), documents([9])), r"pattern: .*Got 9.*Allowed: 8"),
    ],
)
def test_bad_input(build: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        build()
