"""The engine by itself: pieces with masks, pairs in several pieces, and rows that no piece gives a key."""

from __future__ import annotations

import pytest
import torch
from distributed_kernels import use_blocks
from distributed_kernels.attention.engine import Piece, local, piecewise_attention
from distributed_kernels.attention.row_views import RowRange, RowView
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.attention_support import assert_matches, inputs


def rows(first: int, end: int) -> RowView:
    return RowView.rows(RowRange(first, end - first, end - first))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    spans=st.lists(st.tuples(*[st.integers(0, 8)] * 4), max_size=4),
    blocks=st.sampled_from(["plain", "cpu-flash"]),
)
def test_masked_pieces_that_overlap(seed: int, spans: list[tuple[int, int, int, int]], blocks: str) -> None:
    """Any rectangles of pairs with any masks: a pair counts as often as pieces hold it."""
    torch.manual_seed(seed)
    count, pieces = torch.zeros(8, 8), []
    for a, b, c, d in spans:
        (q_first, q_end), (k_first, k_end) = sorted((a, b)), sorted((c, d))
        mask = torch.rand(q_end - q_first, k_end - k_first) < 0.5
        count[q_first:q_end, k_first:k_end] += mask
        pieces.append(Piece(rows(q_first, q_end), rows(k_first, k_end), mask=mask))
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: piecewise_attention(q, k, v, [local(pieces)], 0.5)[0],
            lambda q, k, v: oracles.weighted_attention(q, k, v, count, 0.5),
            inputs(1, 2, 8, 4),
        )


@pytest.mark.parametrize("blocks", ["plain", "cpu-flash"])
def test_a_row_without_key_in_any_of_several_pieces(blocks: str) -> None:
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[4] = False
    pieces = [Piece(RowView.all(6), rows(first, first + 3), mask=mask) for first in (0, 3)]
    qkv = inputs(1, 2, 6, 4)
    with use_blocks(blocks):
        out, lse = piecewise_attention(*qkv, [local(pieces)], 0.5)
    assert (out[:, :, 4] == 0).all()
    assert (lse[:, :, 4] == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum() + lse[:, :, :4].sum(), qkv):
        assert gradient.isfinite().all()


def test_heads_may_take_different_rows() -> None:
    """Two groups of heads in one piece, the rows of each joined from runs."""
    row_view = RowView(
        (
            (slice(0, None, 2), (RowRange(0, 2, 2), RowRange(4, 2, 2))),
            (slice(1, None, 2), (RowRange(0, 8, 4, 1, 1, 2),)),
        )
    )
    kept = torch.zeros(4, 8)
    kept[0::2, [0, 1, 4, 5]] = 1
    kept[1::2, [1, 3, 5, 7]] = 1

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracles.weighted_attention(q, k, v, kept[:, :, None] * kept[:, None, :])

    assert_matches(
        lambda q, k, v: piecewise_attention(q, k, v, [local([Piece(row_view, row_view)])], 0.5)[0],
        oracle,
        inputs(2, 4, 8, 4),
    )
