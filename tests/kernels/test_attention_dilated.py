"""Dilated attention is LongNet's: outputs, gradients, causality; and broken forms of it are seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from distributed_kernels import (
    KernelError,
    attention_with_lse,
    dilated_attention,
    merge_attention,
    use_blocks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.attention_support import BOUNDS, assert_matches, errors, inputs

bounded = settings(max_examples=60, deadline=None, derandomize=True)
Branches = list[tuple[int, int]]


def oracle_of(length: int, heads: int, branches: Branches, causal: bool) -> Tensor:
    return oracles.dilated_counts(length, heads, *zip(*branches, strict=True), causal=causal)


def lists(branches: Branches) -> tuple[list[int], list[int]]:
    return [w for w, _ in branches], [r for _, r in branches]


@pytest.mark.slow
@bounded
@given(
    length=st.integers(1, 24),
    heads=st.integers(1, 5),
    branches=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 7)), min_size=1, max_size=3),
    causal=st.booleans(),
    dtype=st.sampled_from(list(BOUNDS)),
    blocks=st.sampled_from(["plain", "cpu-flash"]),
    batch=st.integers(1, 2),
)
def test_against_the_oracle(
    length: int, heads: int, branches: Branches, causal: bool, dtype: torch.dtype, blocks: str, batch: int
) -> None:
    torch.manual_seed(length)
    count = oracle_of(length, heads, branches, causal)
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: dilated_attention(q, k, v, *lists(branches), causal=causal),
            lambda q, k, v: oracles.weighted_attention(q, k, v, count),
            inputs(batch, heads, length, 4, dtype=dtype),
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("causal", [False, True])
def test_segments_long_enough_to_be_halved(dtype: torch.dtype, causal: bool) -> None:
    branches = [(260, 1), (520, 2)]
    assert_matches(
        lambda q, k, v: dilated_attention(q, k, v, *lists(branches), causal=causal),
        lambda q, k, v: oracles.weighted_attention(q, k, v, oracle_of(520, 2, branches, causal)),
        inputs(1, 2, 520, 8, dtype=dtype),
    )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dilated_attention(q, k, v, [3, 8], [1, 2], causal=causal, scale=0.9)

    assert torch.autograd.gradcheck(function, inputs(1, 3, 7, 4))


def test_the_future_moves_the_past_by_exactly_nothing() -> None:
    q, k, v = (x.detach() for x in inputs(1, 4, 40, 8))
    before = dilated_attention(q, k, v, [8, 40], [1, 3], causal=True)
    for now in (1, 13, 39):
        later = [torch.cat((x[:, :, :now], torch.randn_like(x[:, :, now:]) * 9), 2) for x in (q, k, v)]
        after = dilated_attention(*later, [8, 40], [1, 3], causal=True)
        assert torch.equal(after[:, :, :now], before[:, :, :now])
        assert not torch.equal(after[:, :, now:], before[:, :, now:])


def test_positions_that_no_branch_keeps() -> None:
    qkv = inputs(1, 2, 8, 4)
    out = dilated_attention(*qkv, [8], [4])
    kept = torch.tensor([[i % 4 == head for i in range(8)] for head in range(2)])
    assert (out[0][~kept] == 0).all()
    assert (out[0][kept] != 0).any()
    for gradient in torch.autograd.grad(out.sum(), qkv):
        assert gradient.isfinite().all()
        assert (gradient[0][~kept] == 0).all()


def test_one_branch_of_everything_is_dense_attention() -> None:
    qkv = inputs(1, 2, 10, 4)
    assert torch.allclose(dilated_attention(*qkv, [99], [1]), attention_with_lse(*qkv)[0], rtol=0, atol=1e-14)


def test_branches_weigh_by_their_denominators_in_any_order() -> None:
    qkv = inputs(1, 2, 16, 4)
    first, second = (dilated_attention(*qkv, *lists(b)) for b in ([(4, 1), (16, 2)], [(16, 2), (4, 1)]))
    assert torch.allclose(first, second, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_stays_within_its_rounding(causal: bool) -> None:
    """As for the dense block; merging in float32 adds nothing to it."""
    branches = [(32, 1), (64, 2), (128, 4)]
    found = errors(
        lambda q, k, v: dilated_attention(q, k, v, *lists(branches), causal=causal),
        lambda q, k, v: oracles.weighted_attention(q, k, v, oracle_of(128, 4, branches, causal)),
        inputs(1, 4, 128, 16, dtype=torch.bfloat16),
    )
    assert max(found) <= 4 * 2**-8


def test_memory_does_not_keep_the_scores() -> None:
    q, k, v = inputs(1, 2, 64, 8)
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        dilated_attention(q, k, v, [16, 64], [1, 2])
    assert sum(saved) == 4 * q.numel() + q.numel() // q.shape[-1]


# Forms of the same thing that public code has, each with the test that sees it.


def branch_parts(
    q: Tensor, k: Tensor, v: Tensor, branches: Branches, causal: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each branch over the whole sequence, by masks."""
    length, heads = q.shape[2], q.shape[1]
    counts = [oracle_of(length, heads, [branch], causal) for branch in branches]
    return [oracles.weighted_attention_with_lse(q, k, v, count) for count in counts]


BRANCHES = [(4, 1), (16, 2)]


def detached_mixing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = branch_parts(q, k, v, BRANCHES)
    return merge_attention([out for out, _ in parts], [lse.detach() for _, lse in parts])[0]


def normalised_over_the_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = torch.stack([out for out, _ in branch_parts(q, k, v, BRANCHES, causal=True)])
    return (outs / outs.sum(3, keepdim=True)).sum(0)


def zero_for_no_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = branch_parts(q, k, v, BRANCHES)
    lses = [torch.where(lse == -torch.inf, 0.0, lse) for _, lse in parts]
    return merge_attention([out for out, _ in parts], lses)[0]


def mean_of_branches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([out for out, _ in branch_parts(q, k, v, BRANCHES)]).mean(0)


def padded_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grown = [torch.nn.functional.pad(x, (0, 0, 0, 4)) for x in (q, k, v)]
    return dilated_attention(*grown, [20], [1])[:, :, : q.shape[2]]


def same_offset_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = oracle_of(q.shape[2], 1, BRANCHES, False)
    return oracles.weighted_attention(q, k, v, count)


def all_correct(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = branch_parts(q, k, v, BRANCHES)
    return merge_attention([out for out, _ in parts], [lse for _, lse in parts])[0]


def seen(function: object, branches: Sequence[tuple[int, int]] = BRANCHES) -> tuple[float, float]:
    """Errors (out, worst gradient) that the oracle sees in `function`."""
    count = oracle_of(16, 4, list(branches), False)

    def wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracles.weighted_attention(q, k, v, count)

    assert callable(function)
    out, *gradients = errors(function, wanted, inputs(1, 4, 16, 8))
    return out, max(gradients)


def test_the_correct_form_passes() -> None:
    assert max(seen(all_correct)) < 1e-10


def test_detached_mixing_is_seen_in_the_gradient_alone() -> None:
    out, gradient = seen(detached_mixing)
    assert out < 1e-10
    assert gradient > 0.01


@pytest.mark.parametrize("broken", [zero_for_no_key, mean_of_branches, same_offset_for_all_heads])
def test_wrong_mixing_is_seen(broken: object) -> None:
    assert seen(broken)[0] > 0.01


def test_attended_padding_is_seen() -> None:
    assert seen(padded_keys, [(16, 1)])[0] > 0.01


def test_a_leak_of_the_future_is_seen() -> None:
    q, k, v = (x.detach() for x in inputs(1, 4, 16, 8))
    before = normalised_over_the_sequence(q, k, v)
    v[:, :, 15] += 1
    after = normalised_over_the_sequence(q, k, v)
    assert (after - before)[:, :, :15].abs().max() > 0.01


def test_infinity_minus_infinity_is_seen() -> None:
    """The merge without its guard is NaN where the real one is 0."""
    out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    naive = torch.exp(lse - torch.logaddexp(lse, lse)).unsqueeze(-1) * out
    assert naive.isnan().all()
    merged, merged_lse = merge_attention([out, out], [lse, lse])
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("lengths", "rates", "message"),
    [
        ([], [], "at least 1"),
        ([4, 8], [1], r"\[4, 8\], \[1\]"),
        ([4, 0], [1, 2], r"segment_lengths\[1\].*Got 0"),
        ([4, 8], [1, -2], r"dilation_rates\[1\].*Got -2"),
        ([4.0], [1], r"segment_lengths\[0\].*Got 4.0"),
        ([True], [1], r"segment_lengths\[0\].*Got True"),
    ],
)
def test_bad_input(lengths: list[int], rates: list[int], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        dilated_attention(*inputs(1, 2, 8, 4), lengths, rates)


def test_unequal_lengths_of_q_and_k() -> None:
    q, k, v = inputs(1, 2, 8, 4)
    with pytest.raises(KernelError, match=r"k: shape"):
        dilated_attention(q, k[:, :, :4], v[:, :, :4], [4], [1])
