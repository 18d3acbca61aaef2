"""Dense attention with its log-denominator, the merge of two, and the blocks under them."""

from __future__ import annotations

from itertools import pairwise
from typing import Never

import pytest
import torch
from distributed_kernels import KernelError, attention_with_lse, chosen_blocks, merge_attention, use_blocks
from distributed_kernels.attention.block_kernels import _IMPLEMENTATIONS, block_backward, block_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.attention_support import BOUNDS, assert_matches, error, errors, inputs

blocks = pytest.mark.parametrize("blocks", ["plain", "cpu-flash"])
precisions = pytest.mark.parametrize("dtype", list(BOUNDS))
SHAPES = [(5, 5), (300, 300), (516, 516), (7, 12), (12, 7), (1, 9), (9, 1)]
"""Queries and keys; 300 is halved twice, 516 twice."""
bounded = settings(max_examples=25, deadline=None, derandomize=True)


def rectangle(queries: int, keys: int, causal: bool) -> Tensor:
    """Which keys a query sees; causal hangs from the top left corner."""
    count = torch.ones(queries, keys)
    return count.tril() if causal else count


@pytest.mark.slow
@blocks
@precisions
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_out_against_the_oracle(
    blocks: str, dtype: torch.dtype, causal: bool, queries: int, keys: int
) -> None:
    count = rectangle(queries, keys, causal)
    q = inputs(2, 3, queries, 8, dtype=dtype, count=1)
    k, v = inputs(2, 3, keys, 8, dtype=dtype, count=2)
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: attention_with_lse(q, k, v, causal=causal)[0],
            lambda q, k, v: oracles.weighted_attention(q, k, v, count),
            [*q, k, v],
        )


@pytest.mark.parametrize(("queries", "keys"), [(7, 12), (12, 7)])
def test_the_other_corner_is_seen(queries: int, keys: int) -> None:
    """A causal rectangle hung from the bottom right, as some kernels have it, is not ours."""
    count = torch.ones(queries, keys).tril(keys - queries)
    q = inputs(1, 2, queries, 8, count=1)
    k, v = inputs(1, 2, keys, 8, count=2)
    found = errors(
        lambda q, k, v: oracles.weighted_attention(q, k, v, count),
        lambda q, k, v: oracles.weighted_attention(q, k, v, rectangle(queries, keys, True)),
        [*q, k, v],
    )
    assert found[0] > 0.01


@blocks
@precisions
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_lse_reach_q_and_k(blocks: str, dtype: torch.dtype, causal: bool) -> None:
    def both(out: Tensor, lse: Tensor) -> Tensor:
        return torch.cat((out, lse.to(out.dtype).unsqueeze(-1) * 3), -1)

    count = rectangle(260, 260, causal)
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: both(*attention_with_lse(q, k, v, causal=causal, scale=0.7)),
            lambda q, k, v: both(*oracles.weighted_attention_with_lse(q, k, v, count, 0.7)),
            inputs(1, 2, 260, 8, dtype=dtype),
        )


@blocks
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(9, 9), (1, 9), (2, 1, 9, 9), (3, 9, 9), (1, 3, 1, 9)])
def test_masks_that_broadcast(blocks: str, causal: bool, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.6
    count = mask * rectangle(9, 9, causal)
    with use_blocks(blocks):
        assert_matches(
            lambda q, k, v: attention_with_lse(q, k, v, causal=causal, block_mask=mask)[0],
            lambda q, k, v: oracles.weighted_attention(q, k, v, count),
            inputs(2, 3, 9, 8),
        )


@blocks
def test_rows_with_no_key(blocks: str) -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    qkv = inputs(1, 2, 6, 8)
    with use_blocks(blocks):
        out, lse = attention_with_lse(*qkv, block_mask=mask)
        gradients = torch.autograd.grad(out.sum() + lse[:, :, :2].sum(), qkv)
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -torch.inf).all()
    assert (gradients[0][:, :, 2] == 0).all()
    assert all(grad.isfinite().all() for grad in gradients)


def test_no_keys_at_all() -> None:
    q, k, v = (x[:, :, :length] for x, length in zip(inputs(1, 2, 4, 8), (4, 0, 0), strict=True))
    out, lse = attention_with_lse(q, k, v)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    q, k, v = inputs(1, 2, 5, 4)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention_with_lse(q, k, v, causal=causal)

    assert torch.autograd.gradcheck(function, (q, k, v))


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
def test_tensors_as_projections_leave_them(layout: str) -> None:
    """Heads are usually a transposed view; strides must not matter."""
    qkv = inputs(2, 3, 300, 8) if layout == "heads first" else inputs(2, 300, 3, 8)

    def turned(*tensors: Tensor) -> list[Tensor]:
        return list(tensors) if layout == "heads first" else [x.transpose(1, 2) for x in tensors]

    assert_matches(
        lambda q, k, v: attention_with_lse(*turned(q, k, v), causal=True)[0],
        lambda q, k, v: oracles.weighted_attention(*turned(q, k, v), rectangle(300, 300, True)),
        qkv,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_stays_within_its_rounding(causal: bool) -> None:
    """bfloat16 keeps 8 bits: 2^-8 = 4e-3 for one rounding; 4 of them bound scores, weights and sums."""
    found = errors(
        lambda q, k, v: attention_with_lse(q, k, v, causal=causal)[0],
        lambda q, k, v: oracles.weighted_attention(q, k, v, rectangle(512, 512, causal)),
        inputs(1, 2, 512, 16, dtype=torch.bfloat16),
    )
    assert max(found) <= 4 * 2**-8


def test_autocast_leaves_the_precision_of_float32_alone() -> None:
    qkv = inputs(1, 2, 40, 8, dtype=torch.float32)
    with use_blocks("plain"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches(
            lambda q, k, v: attention_with_lse(q, k, v)[0],
            lambda q, k, v: oracles.weighted_attention(q, k, v, rectangle(40, 40, False)),
            qkv,
        )


def test_scores_far_from_zero() -> None:
    assert_matches(
        lambda q, k, v: attention_with_lse(q, k, v, causal=True)[0],
        lambda q, k, v: oracles.weighted_attention(q, k, v, rectangle(300, 300, True)),
        inputs(1, 1, 300, 8, spread=30.0),
    )


@bounded
@given(
    cuts=st.lists(st.integers(0, 12), min_size=0, max_size=3),
    seed=st.integers(0, 99),
    dead=st.booleans(),
)
def test_merging_parts_of_the_keys_is_attention_over_all(cuts: list[int], seed: int, dead: bool) -> None:
    torch.manual_seed(seed)
    bounds = [0, *sorted(cuts), 12]
    mask = torch.rand(5, 12) < 0.7
    mask[1] &= not dead
    q = inputs(1, 2, 5, 4, count=1)
    k, v = inputs(1, 2, 12, 4, count=2)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            attention_with_lse(q, k[:, :, a:b], v[:, :, a:b], block_mask=mask[:, a:b])
            for a, b in pairwise(bounds)
        ]
        out, lse = merge_attention(*zip(*parts, strict=True))
        return torch.cat((out, torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)), -1)

    def wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = oracles.weighted_attention_with_lse(q, k, v, mask)
        return torch.cat((out, torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)), -1)

    assert_matches(merged, wanted, [*q, k, v])


@blocks
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_a_block_takes_the_whole_softmax(blocks: str, causal: bool, strided: bool) -> None:
    """The gradients of two blocks of keys, each given the (out, lse) of both, add up to the whole's."""
    q, k, v, dout = inputs(1, 2, 256, 8, count=4)
    count = torch.cat((rectangle(256, 256, causal), torch.ones(256, 256)), 1)
    keys, values = (torch.cat((x, x * 0.5), 2).detach().requires_grad_() for x in (k, v))
    out, lse = oracles.weighted_attention_with_lse(q, keys, values, count)
    wanted = torch.autograd.grad(out, (q, keys, values), dout)
    lse = lse.detach()
    if strided:
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    parts = [
        block_backward(
            dout.detach(),
            q.detach(),
            keys[:, :, a : a + 256].detach(),
            values[:, :, a : a + 256].detach(),
            out.detach(),
            lse,
            causal and a == 0,
            8**-0.5,
            blocks=blocks,
        )
        for a in (0, 256)
    ]
    assert error(parts[0][0] + parts[1][0], wanted[0]) < 1e-12
    for place in (1, 2):
        assert error(torch.cat([part[place] for part in parts], 2), wanted[place]) < 1e-12


def test_the_choice_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q = inputs(1, 1, 4, 8)[0]
    assert chosen_blocks(q) == "cpu-flash"
    with use_blocks("plain"):
        assert chosen_blocks(q) == "plain"
        with use_blocks("auto"):
            assert chosen_blocks(q) == "cpu-flash"
    monkeypatch.setenv("DISTRIBUTED_KERNELS", "plain")
    assert chosen_blocks(q) == "plain"
    with use_blocks("cpu-flash"):
        assert chosen_blocks(q) == "cpu-flash"


def test_the_backward_uses_the_blocks_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Never:
        raise RuntimeError("the native backward was called")

    native = _IMPLEMENTATIONS["cpu-flash"]._replace(backward=broken)
    monkeypatch.setitem(_IMPLEMENTATIONS, "cpu-flash", native)
    qkv = inputs(1, 1, 4, 8)
    with use_blocks("plain"):
        out, _ = attention_with_lse(*qkv)
    out.sum().backward()
    out, _ = attention_with_lse(*qkv)
    with pytest.raises(RuntimeError, match="native backward"):
        out.sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; untested on GPU at this commit")
@pytest.mark.parametrize(
    ("blocks", "dtype"), [("cuda-flash", torch.bfloat16), ("cuda-efficient", torch.float32)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_blocks_against_plain(blocks: str, dtype: torch.dtype, causal: bool) -> None:
    q, k, v, dout = (x.detach().cuda() for x in inputs(2, 3, 200, 40, dtype=dtype, count=4))
    plain = block_forward(q, k, v, causal, 0.2, blocks="plain")
    native = block_forward(q, k, v, causal, 0.2, blocks=blocks)
    bound = 5e-6 if dtype == torch.float32 else 4 * 2**-8
    assert max(error(a, b.double()) for a, b in zip(native, plain, strict=True)) <= bound
    wanted = block_backward(dout, q, k, v, *plain, causal, 0.2, blocks="plain")
    found = block_backward(dout, q, k, v, *plain, causal, 0.2, blocks=blocks)
    assert max(error(a, b.double()) for a, b in zip(found, wanted, strict=True)) <= bound


def test_bad_input() -> None:
    q, k, v = (x.detach() for x in inputs(1, 2, 4, 8))
    refused = [
        (lambda: attention_with_lse(q[0], k[0], v[0]), "q: .*four dimensions.*heads, length"),
        (lambda: attention_with_lse(q, k[:, [0, 1, 1]], v), r"k: .*\(1, 3, 4, 8\).*\(1, 2, keys, 8\)"),
        (lambda: attention_with_lse(q, k[:, :1], v), r"v: .*\(1, 2, 4, 8\).*\(1, 1, keys, 8\)"),
        (lambda: attention_with_lse(q, k, v, dropout_p=1.0), r"dropout_p: .*Got 1\.0.*below 1"),
        (lambda: attention_with_lse(q, k, v[..., :4]), "v: shape"),
        (lambda: attention_with_lse(q, k[:, :, :2], v), "v: shape"),
        (lambda: attention_with_lse(q, k.float(), v), "k: dtype.*float32.*float64.*k.to"),
        (lambda: attention_with_lse(q.long(), k.long(), v.long()), "floating-point.*int64"),
        (
            lambda: attention_with_lse(q.half(), k.half(), v.half()),
            "cpu has no.*float16.*bfloat16",
        ),
        (lambda: attention_with_lse(q, k, v, block_mask=torch.ones(4, 4)), "block_mask: must be boolean"),
        (
            lambda: attention_with_lse(q, k, v, block_mask=torch.ones(3, 4, dtype=torch.bool)),
            r"block_mask: does not broadcast.*\(3, 4\).*\(1, 2, 4, 4\)",
        ),
        (lambda: merge_attention([], []), "at least one"),
        (lambda: merge_attention([q], []), "1 outs and 0 lses"),
        (lambda: merge_attention([q, q[:, :, :2]], [q[..., 0], q[..., 0]]), r"outs\[1\]"),
    ]
    for call, message in refused:
        with pytest.raises(KernelError, match=message):
            call()
    with pytest.raises(KernelError, match=r"unknown implementation.*'fast'.*plain"), use_blocks("fast"):
        pass
    with use_blocks("cuda-flash"), pytest.raises(KernelError, match=r"cuda-flash cannot.*float64 on cpu"):
        attention_with_lse(q, k, v)
