"""Heads of keys that several heads of queries share, masks of keys, and dropout of the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from distributed_kernels import (
    attention_with_lse,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
    use_blocks,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels.attention_support import assert_matches, errors, inputs
from tests.kernels.gloo_ranks import SIZE, Ranks
from tests.kernels.rank_checks import whole_inputs

SHAPE = (2, 4, 32, 8)
"""Batch, heads of queries, whole length, head_dim."""
ACROSS = [
    ("ring_attention", {"layout": "zigzag", "causal": True}),
    ("ring_attention", {"layout": "contiguous", "causal": True}),
    ("ring_attention", {"layout": "contiguous"}),
    ("ulysses_attention", {"causal": True}),
]


def grouped_inputs(shared: int) -> list[Tensor]:
    return [*inputs(2, 4, 24, 8, count=1), *inputs(2, shared, 24, 8, count=2)]


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("blocks", ["plain", "cpu-flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_against_torch(causal: bool, blocks: str, shared: int) -> None:
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: attention_with_lse(q, k, v, causal=causal)[0],
            partial(scaled_dot_product_attention, is_causal=causal, enable_gqa=True),
            grouped_inputs(shared),
        )


@pytest.mark.parametrize(
    "function",
    [
        partial(dilated_attention, segment_lengths=[8, 16], dilation_rates=[1, 3]),
        partial(block_sparse_attention, block_size=4, sparsity_ratio=0.5),
        partial(block_sparse_attention, block_size=8, mask=torch.ones(4, 3, 3, dtype=torch.bool).tril()),
        partial(
            block_sparse_dilated_attention,
            segment_lengths=[8, 24],
            dilation_rates=[1, 2],
            block_size=2,
            sparsity_ratio=0.5,
        ),
    ],
)
def test_shared_heads_are_those_repeated(function: Callable[..., Tensor]) -> None:
    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), causal=True)

    assert_matches(partial(function, causal=True), repeated, grouped_inputs(2))


def test_another_order_of_heads_is_seen() -> None:
    """Head h of q reads head h // 2 of k, not h % 2."""

    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    found = errors(lambda q, k, v: attention_with_lse(q, k, v)[0], tiled, grouped_inputs(2))
    assert min(found) > 1e-3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("function", "options"), ACROSS)
def test_across_ranks_against_torch(
    ranks: Ranks, function: str, options: dict[str, Any], masked: bool
) -> None:
    """Two heads of keys for four of queries; `masked` leaves out keys of the last sequence, as padding."""
    q, k, v, dout = whole_inputs(SHAPE, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k[:, :2].clone(), v[:, :2].clone())]
    seen = torch.ones(SHAPE[0], 1, SHAPE[2], SHAPE[2], dtype=torch.bool)
    if masked:
        seen[-1, :, :, -(SHAPE[2] // 4) :] = False
    if options.get("causal"):
        seen = seen.tril()
    out = scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    size = 2 if function == "ulysses_attention" else SIZE
    found = ranks.run("grouped", size, function=function, shape=SHAPE, shared=2, masked=masked, **options)
    if options.get("layout") == "zigzag":
        results = found[0]["results"]
    else:
        results = [
            torch.cat(parts, 2) for parts in zip(*(each["results"] for each in found[:size]), strict=True)
        ]
    for mine, theirs in zip(results, wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-12


def test_shared_heads_travel_as_they_are(ranks: Ranks) -> None:
    arguments = {"function": "ring_attention", "shape": SHAPE, "layout": "contiguous", "masked": False}
    whole, shared = (ranks.run("grouped", SIZE, shared=heads, **arguments)[0] for heads in (4, 2))
    assert whole["forward"] == 2 * shared["forward"] > 0
    assert whole["backward"] == 2 * shared["backward"] > 0


def test_heads_that_the_ranks_cannot_share_are_refused(ranks: Ranks) -> None:
    for text in ranks.run("grouped_error", SIZE, shape=SHAPE, shared=2):
        assert text.startswith("k: 2 heads cannot be shared by 4 ranks. Got 2. Allowed: multiples of 4.")


# -- dropout -----------------------------------------------------------------------------------------------

P = 0.25


def check_weights(weights: Tensor, length: int) -> None:
    """Weights that were 1 / length are 0, or 1 / length / (1 - p), and the share of zeros is p."""
    kept = weights[weights != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / length / (1 - P)))
    share, deviation = 1 - kept.numel() / weights.numel(), (P * (1 - P) / weights.numel()) ** 0.5
    assert abs(share - P) < 5 * deviation


def rows_are_independent(weights: Tensor) -> bool:
    """Whether no two rows of weights drop the same keys."""
    masks = (weights.flatten(0, -2) != 0).long().tolist()
    return len({tuple(mask) for mask in masks}) == len(masks)


def test_dense_dropout_is_a_draw_with_the_right_scale() -> None:
    length = 64
    q = torch.zeros(1, 2, length, length, dtype=torch.float64)
    v = torch.eye(length, dtype=torch.float64).expand_as(q)
    torch.manual_seed(1)
    first, lse = attention_with_lse(q, q, v, dropout_p=P)
    check_weights(first, length)
    assert rows_are_independent(first)
    assert torch.equal(lse, attention_with_lse(q, q, v)[1])
    assert not torch.equal(first, attention_with_lse(q, q, v, dropout_p=P)[0])
    torch.manual_seed(1)
    assert torch.equal(first, attention_with_lse(q, q, v, dropout_p=P)[0])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        *ACROSS[1:3],
        ("ulysses_attention", {}),
        ("dilated_attention", {"segment_lengths": [64], "dilation_rates": [1]}),
        ("block_sparse_attention", {"block_size": 4, "sparsity_ratio": 1.0}),
    ],
)
def test_dropout_across_ranks_is_one_draw(ranks: Ranks, function: str, options: dict[str, Any]) -> None:
    """Ranks that share a seed drop other weights of their slices, and the same ones when seeded again."""
    shape = (1, 4, 64, 64)
    options = {key: value for key, value in options.items() if key != "causal"}
    found = ranks.run("dropped", SIZE, function=function, shape=shape, p=P, **options)
    weights = torch.cat([each["weights"] for each in found], 2)
    check_weights(weights, shape[2])
    assert rows_are_independent(weights)
    assert all(each["again"] for each in found)
    assert not any(torch.equal(each["weights"], each["next"]) for each in found)


@pytest.mark.parametrize(
    ("function", "options"),
    [*ACROSS, ("dilated_attention", {"segment_lengths": [8, 32], "dilation_rates": [1, 2]})],
)
def test_gradients_are_those_of_the_masks(ranks: Ranks, function: str, options: dict[str, Any]) -> None:
    assert all(ranks.run("dropout_gradients", SIZE, function=function, shape=(1, 4, 32, 4), **options))
