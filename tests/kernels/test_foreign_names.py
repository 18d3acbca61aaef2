"""Arguments of other libraries are answered by a sentence with ours; layouts and offsets of theirs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import distributed_kernels as kernels
import pytest
import torch
from distributed_kernels import (
    KernelError,
    MultiheadDilatedAttention,
    SKConv2d,
    SKLinear,
    attention_with_lse,
    dilated_attention,
    ring_attention,
    ulysses_attention,
)
from distributed_kernels.foreign_names import INSTEAD, OURS, advice
from torch import Tensor, nn

from tests.kernels import oracles
from tests.kernels.attention_support import assert_matches, inputs
from tests.kernels.gloo_ranks import SIZE, Ranks

dilated = partial(dilated_attention, segment_lengths=[4], dilation_rates=[1])


@pytest.mark.parametrize(
    ("function", "given", "parts"),
    [
        (attention_with_lse, {"softmax_scale": 0.1}, ["softmax_scale is scale here", "x.transpose(1, 2)"]),
        (attention_with_lse, {"window_size": (4, 0)}, ["sliding_window(length, before, after)"]),
        (dilated, {"is_causal": True}, ["is_causal is causal here", "Got 'is_causal=True'"]),
        (dilated, {"cu_seqlens": torch.arange(3)}, ["documents(cu_seqlens.diff())"]),
        (dilated, {"p": 0.1, "attn_bias": None}, ["p is dropout_p here", "attention_with_lse(block_mask=)"]),
        (ring_attention, {"process_group": None}, ["process_group is group here"]),
        (ring_attention, {"key_padding_mask": None}, ["key_mask, True where a key may be seen"]),
        (ulysses_attention, {"scatter_idx": 2}, ["heads are dimension 1 and positions dimension 2"]),
        (ulysses_attention, {"local_attention": None}, ["local_attention is attention here"]),
    ],
)
def test_a_function_names_its_own(
    function: Callable[..., Any], given: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(KernelError, match=r"no argument of \w+_\w+\.") as caught:
        function(*inputs(1, 2, 8, 4), **given)
    for part in parts:
        assert part in str(caught.value)


def test_torchscales_names() -> None:
    with pytest.raises(KernelError, match=r"segment_length is segment_lengths here; dilated_ratio is dila"):
        dilated_attention(*inputs(1, 2, 8, 4), segment_length=[4], dilated_ratio=[1])
    with pytest.raises(KernelError, match=r"dilated_ratio is dilation_rates here"):
        MultiheadDilatedAttention(8, 2, [4], [1], dilated_ratio=[1])


@pytest.mark.parametrize("function", [dilated, attention_with_lse, ulysses_attention])
def test_other_names_are_pythons_own_error(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'colour'"):
        function(*inputs(1, 2, 8, 4), colour=1)


def test_every_name_is_answered_somewhere_and_none_is_ours() -> None:
    """A name that one of our functions has must not be answered there."""
    signatures = [
        inspect.signature(getattr(kernels, name)).parameters
        for name in kernels.__all__
        if callable(getattr(kernels, name)) and not isinstance(getattr(kernels, name), dict)
    ]
    own = {name for parameters in signatures for name in parameters}
    for name, ours in OURS.items():
        assert ours in own, name
        assert advice(name, own) == f"{name} is {ours} here"
    assert not OURS.keys() & INSTEAD.keys()


def test_the_signature_stays() -> None:
    names = list(inspect.signature(dilated_attention).parameters)
    assert names[:5] == ["q", "k", "v", "segment_lengths", "dilation_rates"]


# -- offsets of heads ------------------------------------------------------------------------------------


def torchscale_form(q: Tensor, k: Tensor, v: Tensor, widths: list[int], rates: list[int]) -> Tensor:
    """Dilated attention with heads in `rate` groups, by reshapes and diagonals; segments and heads divide.

    Weights of the branches have gradients, as LongNet's formula does.
    """
    outs, lses = [], []
    for width, rate in zip(widths, rates, strict=True):
        kept = [_kept(x, width, rate) for x in (q, k, v)]
        scores = kept[0] @ kept[1].mT / math.sqrt(q.shape[-1])
        out, lse = scores.softmax(-1) @ kept[2], scores.logsumexp(-1)
        outs.append(_spread(out, q.shape, width, rate, 0.0))
        lses.append(_spread(lse.unsqueeze(-1), (*q.shape[:3], 1), width, rate, -math.inf))
    shares = torch.stack(lses).softmax(0)
    return (shares * torch.stack(outs)).sum(0)


def _kept(x: Tensor, width: int, rate: int) -> Tensor:
    """(B, H, N, D) -> (B, groups, heads of a group, segments, rows, D)."""
    parts = x.unflatten(1, (rate, -1)).unflatten(3, (-1, width // rate, rate))
    kept: Tensor = parts.diagonal(0, 1, 5)
    return kept.movedim(-1, 1)


def _spread(x: Tensor, shape: tuple[int, ...], width: int, rate: int, empty: float) -> Tensor:
    """Undo `_kept`, with `empty` in rows that a group does not keep."""
    where = torch.eye(rate, dtype=torch.bool)[None, :, None, None, None, :, None]
    filled = torch.where(where, x.unsqueeze(5), torch.tensor(empty, dtype=x.dtype))
    return filled.reshape(shape)


def test_the_transcription_is_the_definition() -> None:
    count = oracles.dilated_counts(16, 8, [8, 16], [1, 4], grouped=True)
    assert_matches(
        lambda q, k, v: torchscale_form(q, k, v, [8, 16], [1, 4]),
        lambda q, k, v: oracles.weighted_attention(q, k, v, count),
        inputs(2, 8, 16, 4),
    )


@pytest.mark.parametrize(("widths", "rates"), [([8, 16], [1, 2]), ([4, 16], [1, 4])])
def test_grouped_offsets_are_torchscales(widths: list[int], rates: list[int]) -> None:
    assert_matches(
        lambda q, k, v: dilated_attention(q, k, v, widths, rates, head_offsets="grouped"),
        lambda q, k, v: torchscale_form(q, k, v, widths, rates),
        inputs(2, 8, 16, 4),
    )


def test_offsets_differ_and_unknown_ones_are_refused() -> None:
    qkv = inputs(1, 4, 16, 4)
    kinds = [dilated_attention(*qkv, [4, 16], [1, 2], head_offsets=k) for k in ("interleaved", "grouped")]
    assert not torch.allclose(*kinds)
    with pytest.raises(KernelError, match="head_offsets: unknown"):
        dilated_attention(*qkv, [4], [1], head_offsets="torchscale")
    with pytest.raises(KernelError, match="head_offsets: unknown"):
        MultiheadDilatedAttention(8, 2, [4], [1], head_offsets="torchscale")


# -- layouts of slices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "layout", "causal", "warned"),
    [
        ("chunk", "zigzag", True, True),
        ("chunk", "contiguous", True, False),
        ("chunk", "zigzag", False, False),
        ("zigzag", "zigzag", True, False),
        ("packed", "zigzag", True, False),
    ],
)
def test_chunks_in_the_zigzag_layout_get_a_warning(
    ranks: Ranks, cut: str, layout: str, causal: bool, warned: bool
) -> None:
    """`packed`: q is a part of a tensor that is as large as the whole sequence, but of the slice alone."""
    for texts in ranks.run("layout_warnings", SIZE, cut=cut, layout=layout, causal=causal):
        assert [("layout='contiguous'" in text and "zigzag_slice" in text) for text in texts] == [
            True
        ] * warned


# -- convolutions ----------------------------------------------------------------------------------------


def test_positions_of_convolutions_are_those_of_torch() -> None:
    ours, theirs = (list(inspect.signature(kind).parameters) for kind in (SKConv2d, nn.Conv2d))
    assert ours[: len(theirs)] == theirs
    layer = SKConv2d(16, 32, 3, 2, 1, rank=4)
    x = torch.randn(1, 16, 9, 9)
    assert (layer.stride, layer.padding, layer.rank) == (2, 1, 4)
    assert layer(x).shape == nn.Conv2d(16, 32, 3, 2, 1)(x).shape


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SKConv2d(16, 32, 3, 2), r"rank: missing.*fourth position is nn\.Conv2d's stride.*stride=2"),
        (lambda: SKConv2d(16, 32, 3, num_terms=2, low_rank=4), "one layer: give rank"),
        (lambda: SKConv2d(16, 32, 3, rank=4, padding_mode="reflect"), "paddings other than zeros"),
        (lambda: SKLinear(64, 64, lora_rank=4), "lora_rank is rank here"),
        (lambda: SKLinear(64, 64, W_init=None), r"factorize_linear\(linear, rank\)"),
    ],
)
def test_layers_name_their_own(build: Callable[[], object], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        build()
