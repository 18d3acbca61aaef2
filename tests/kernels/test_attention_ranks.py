"""Attention over ranks is attention: values, gradients and received bytes on two and four gloo ranks."""

from __future__ import annotations

from typing import Any

import distributed_kernels as kernels
import pytest
import torch
from distributed_kernels import zigzag_positions
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.gloo_ranks import SIZE, Ranks
from tests.kernels.rank_checks import seeded_module, whole_inputs

SHAPE = (2, 4, 32, 8)
"""Batch, heads, whole length, head_dim."""
WITHIN = 1e-6
sizes = pytest.mark.parametrize("size", [2, 4])
masks = pytest.mark.parametrize("causal", [False, True])


def expected(shape: tuple[int, ...], count: Tensor) -> list[Tensor]:
    """Output and gradients by the float64 oracle, in one process."""
    q, k, v, dout = whole_inputs(shape, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = oracles.weighted_attention(*leaves, count)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def triangle(length: int, causal: bool) -> Tensor:
    ones = torch.ones(length, length)
    return ones.tril() if causal else ones


def joined(found: list[dict[str, Any]], size: int, dim: int = 2) -> list[Tensor]:
    """The slices of the first group's ranks side by side."""
    return [torch.cat(parts, dim) for parts in zip(*(each["results"] for each in found[:size]), strict=True)]


def assert_close(results: list[Tensor], wanted: list[Tensor], within: float = WITHIN) -> None:
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        assert (mine.double() - theirs).abs().max().item() <= within * scale, name


@sizes
@masks
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_ring_is_dense_attention(ranks: Ranks, size: int, causal: bool, layout: str) -> None:
    wanted = expected(SHAPE, triangle(SHAPE[2], causal))
    if layout == "zigzag":
        found = ranks.run("zigzag", size, shape=SHAPE, causal=causal)
        assert_close(found[0]["results"], wanted)
        assert_close(found[SIZE - 1]["results"], wanted)
    else:
        arguments = {"function": "ring_attention", "layout": layout, "causal": causal}
        found = ranks.run("attention", size, shape=SHAPE, **arguments)
        assert_close(joined(found, size), wanted)


@sizes
@masks
def test_ring_received_bytes(ranks: Ranks, size: int, causal: bool) -> None:
    found = ranks.run("attention", size, function="ring_attention", shape=SHAPE, causal=causal)
    slice_of_one = 4 * SHAPE[0] * SHAPE[1] * SHAPE[3] * (SHAPE[2] // size)
    for each in found:
        assert each["forward"] == 2 * slice_of_one * (size - 1)
        # Keys and values again, and their gradients, which go one hop further: home.
        assert each["backward"] == 2 * slice_of_one * (size - 1) + 2 * slice_of_one * size


def test_ring_in_float64_and_bfloat16(ranks: Ranks) -> None:
    wanted = expected(SHAPE, triangle(SHAPE[2], True))
    for dtype, within in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        found = ranks.run("attention", 4, function="ring_attention", shape=SHAPE, dtype=dtype, causal=True,
                          layout="contiguous")  # fmt: skip
        assert found[0]["results"][0].dtype == dtype
        assert_close(joined(found, 4), wanted, within)


def test_ring_gradients_travel_wider_than_bfloat16(ranks: Ranks) -> None:
    found = ranks.run("attention", 4, function="ring_attention", shape=SHAPE, dtype=torch.bfloat16)
    elements = 2 * SHAPE[0] * SHAPE[1] * SHAPE[3] * (SHAPE[2] // 4)
    assert found[0]["backward"] == elements * (2 * 3 + 4 * 4)


def test_the_layout_matters(ranks: Ranks) -> None:
    assert all(ranks.run("zigzag_differs_from_contiguous", 4, shape=SHAPE)[:3])


def test_zigzag_gives_every_rank_the_same_work() -> None:
    work = []
    for rank in range(4):
        positions = zigzag_positions(64, rank, 4)
        assert positions.diff().gt(0).all()
        work.append(int((positions + 1).sum()))
    assert len(set(work)) == 1
    together = torch.cat([zigzag_positions(64, rank, 4) for rank in range(4)])
    assert together.sort().values.equal(torch.arange(64))


@sizes
@masks
def test_ulysses_is_dense_attention(ranks: Ranks, size: int, causal: bool) -> None:
    found = ranks.run("attention", size, function="ulysses_attention", shape=SHAPE, causal=causal)
    assert_close(joined(found, size), expected(SHAPE, triangle(SHAPE[2], causal)))
    slice_of_one = 4 * SHAPE[0] * SHAPE[1] * SHAPE[3] * (SHAPE[2] // size)
    for each in found:
        assert each["forward"] == each["backward"] == 4 * slice_of_one * (size - 1) // size


@sizes
def test_ulysses_around_dilated_attention_keeps_the_heads_offsets(ranks: Ranks, size: int) -> None:
    inner = {"function": "dilated_attention", "segment_lengths": [8, 32], "dilation_rates": [1, 4]}
    found = ranks.run("attention", size, function="ulysses_attention", shape=SHAPE, causal=True, inner=inner)
    count = oracles.dilated_counts(SHAPE[2], SHAPE[1], [8, 32], [1, 4], causal=True)
    assert_close(joined(found, size), expected(SHAPE, count))


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("dilated_attention", {}),
        ("block_sparse_dilated_attention", {"block_size": 4, "sparsity_ratio": 1.0}),
        ("ulysses_attention", {}),
    ],
)
def test_grouped_offsets_over_ranks(ranks: Ranks, function: str, options: dict[str, Any]) -> None:
    """Segments inside of a slice and over all; under Ulysses, the heads of a rank are a part of more."""
    given = {"segment_lengths": [8, 32], "dilation_rates": [1, 2], "head_offsets": "grouped", **options}
    if function == "ulysses_attention":
        given = {"inner": {"function": "dilated_attention", **given}}
    found = ranks.run("attention", 4, function=function, shape=SHAPE, **given)
    count = oracles.dilated_counts(SHAPE[2], SHAPE[1], [8, 32], [1, 2], grouped=True)
    assert_close(joined(found, 4), expected(SHAPE, count))


DILATED = [
    ([8, 32], [1, 2]),
    ([4, 16, 32], [1, 2, 4]),
    ([8, 16, 999], [1, 3, 5]),
    ([2, 32], [3, 16]),
]
"""Segments within a slice, over two ranks and over all; rates that divide no slice, and above the heads."""


@sizes
@masks
@pytest.mark.parametrize(("lengths", "rates"), DILATED)
def test_dilated_over_ranks(
    ranks: Ranks, size: int, causal: bool, lengths: list[int], rates: list[int]
) -> None:
    arguments = {"segment_lengths": lengths, "dilation_rates": rates, "causal": causal}
    found = ranks.run("attention", size, function="dilated_attention", shape=SHAPE, **arguments)
    count = oracles.dilated_counts(SHAPE[2], SHAPE[1], lengths, rates, causal=causal)
    assert_close(joined(found, size), expected(SHAPE, count))


def test_the_last_segment_may_span_fewer_ranks(ranks: Ranks) -> None:
    arguments = {"segment_lengths": [8, 24], "dilation_rates": [1, 2]}
    found = ranks.run("attention", 4, function="dilated_attention", shape=SHAPE, **arguments)
    assert_close(
        joined(found, 4), expected(SHAPE, oracles.dilated_counts(SHAPE[2], SHAPE[1], [8, 24], [1, 2]))
    )


@sizes
def test_dilated_received_bytes_do_not_grow_with_the_sequence(ranks: Ranks, size: int) -> None:
    lengths, rates = [8, 16, 32], [1, 2, 4]
    arguments = {"segment_lengths": lengths, "dilation_rates": rates, "causal": True}
    found = ranks.run("attention", size, function="dilated_attention", shape=SHAPE, **arguments)
    slice_length = SHAPE[2] // size
    row = 4 * SHAPE[0] * SHAPE[1] * SHAPE[3]
    travelling = [(w, r) for w, r in zip(lengths, rates, strict=True) if w > slice_length]
    assert travelling
    for each in found:
        forward = 2 * row * sum((w - slice_length) // r for w, r in travelling)
        assert each["forward"] == forward
        assert each["backward"] == forward + 2 * row * sum(w // r for w, r in travelling)


@sizes
@masks
@pytest.mark.parametrize("pattern", ["local", "strided", "local+global"])
def test_block_sparse_ring(ranks: Ranks, size: int, causal: bool, pattern: str) -> None:
    arguments = {"pattern": pattern, "block_size": 4, "sparsity_ratio": 0.4, "causal": causal}
    found = ranks.run("attention", size, function="block_sparse_attention", shape=SHAPE, **arguments)
    mask = kernels.block_pattern(pattern, SHAPE[2], block_size=4, sparsity_ratio=0.4, causal=causal)
    assert_close(joined(found, size), expected(SHAPE, oracles.block_counts(mask, SHAPE[2], 4, causal=causal)))


def test_block_sparse_ring_with_a_mask_for_each_head(ranks: Ranks) -> None:
    mask = torch.rand(SHAPE[1], 8, 8) < 0.4
    arguments = {"mask": mask, "block_size": 4, "causal": True}
    found = ranks.run("attention", 4, function="block_sparse_attention", shape=SHAPE, **arguments)
    assert_close(joined(found, 4), expected(SHAPE, oracles.block_counts(mask, SHAPE[2], 4, causal=True)))


@sizes
@masks
@pytest.mark.parametrize("own_masks", [False, True])
def test_block_sparse_ring_of_slices_in_one_piece(
    ranks: Ranks, size: int, causal: bool, own_masks: bool
) -> None:
    torch.manual_seed(size)
    mask = torch.rand((SHAPE[1], 8, 8) if own_masks else (8, 8)) < 0.4
    found = ranks.run("slices_in_one_piece", size, shape=SHAPE, mask=mask, block_size=4, causal=causal)
    assert_close(joined(found, size), expected(SHAPE, oracles.block_counts(mask, SHAPE[2], 4, causal=causal)))


@sizes
@masks
def test_block_sparse_dilated_ring(ranks: Ranks, size: int, causal: bool) -> None:
    arguments = {"pattern": "local+global", "block_size": 2, "sparsity_ratio": 0.5, "causal": causal}
    found = ranks.run("attention", size, function="block_sparse_dilated_attention", shape=SHAPE,
                      segment_lengths=[8, 32], dilation_rates=[1, 2], **arguments)  # fmt: skip

    def kept(rows: int) -> Tensor:
        return kernels.block_pattern("local+global", rows, block_size=2, sparsity_ratio=0.5, causal=causal)

    count = oracles.dilated_block_counts(SHAPE[2], SHAPE[1], [(8, 1), (32, 2)], kept, 2, causal=causal)
    assert_close(joined(found, size), expected(SHAPE, count))


MODULES: dict[str, dict[str, Any]] = {
    "MultiheadDilatedAttention": {},
    "RingDistributedDilatedAttention": {},
    "DistributedMultiheadDilatedAttention": {"sequence_parallel": True},
    "BlockSparseRingDistributedDilatedAttention": {"sparsity_ratio": 0.5, "block_size": 2},
    "DilatedTransformerBlock": {},
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_over_ranks(ranks: Ranks, name: str) -> None:
    options: dict[str, Any] = {
        "num_heads": 4,
        "segment_lengths": [8, 32],
        "dilation_rates": [1, 2],
        "causal": True,
        **MODULES[name],
    }
    own = name != "DistributedMultiheadDilatedAttention"  # which takes the default group, being asked to
    found = ranks.run("module", 4, name=name, shape=(2, 32, 16), own_group=own, **options)
    layer = seeded_module(name, 16, **options)
    x, dout = whole_inputs((2, 32, 16))[:2]
    out = layer(x.requires_grad_())
    out.backward(dout)
    assert x.grad is not None
    for mine, theirs in zip(joined(found, 4, 1), (out, x.grad), strict=True):
        assert torch.allclose(mine, theirs, atol=5e-6)
    for mine, parameter in zip(found[1]["parameters"], layer.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(mine, parameter.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["RingDistributedDilatedAttention", "BlockSparseRingDistributedDilatedAttention"]
)
def test_ranks_are_not_guessed_to_share_a_sequence(ranks: Ranks, name: str) -> None:
    for message in ranks.run("module_error", 4, name=name):
        assert "needs the ranks that hold" in message
        assert "group=torch.distributed.group.WORLD" in message


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"function": "ring_attention", "uneven": True}, ["slices of different shapes", "(2, 4, 7, 8)"]),
    ({"function": "ulysses_attention", "shape": (2, 6, 32, 8)}, ["6 heads", "4 ranks", "multiples of 4"]),
    ({"function": "ring_attention", "causal": True, "shape": (1, 2, 12, 4)}, ["Got 3", "even length"]),
    (
        {"function": "dilated_attention", "segment_lengths": [12], "dilation_rates": [1]},
        ["12", "slice of 8", "multiples"],
    ),
    ({"function": "block_sparse_attention", "block_size": 3}, ["3 does not divide", "slice of 8"]),
    (
        {
            "function": "block_sparse_dilated_attention",
            "block_size": 8,
            "segment_lengths": [32],
            "dilation_rates": [2],
        },
        ["8 does not divide the 4 rows"],
    ),
    (
        {
            "function": "block_sparse_dilated_attention",
            "block_size": 1,
            "segment_lengths": [32],
            "dilation_rates": [3],
        },
        ["dilation_rates: 3 does not divide", "slice of 8"],
    ),
]


@pytest.mark.parametrize(("arguments", "parts"), REFUSED)
def test_every_rank_says_what_does_not_fit(ranks: Ranks, arguments: dict[str, Any], parts: list[str]) -> None:
    for message in ranks.run("error", 4, **{"shape": SHAPE, **arguments}):
        for part in parts:
            assert part in message


def test_a_group_without_this_rank(ranks: Ranks) -> None:
    first, *others = ranks.run("foreign_group", 4)
    assert first == ""
    assert all("group:" in message for message in others)
