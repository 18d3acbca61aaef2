"""The layers over the attention functions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import distributed_kernels as kernels
import pytest
import torch
from distributed_kernels import DilatedTransformerBlock, KernelError, MultiheadDilatedAttention
from torch import Tensor, nn

from tests.kernels import oracles

DILATED = [
    "MultiheadDilatedAttention",
    "RingDistributedDilatedAttention",
    "DistributedMultiheadDilatedAttention",
]
NAMES = [*DILATED, "BlockSparseRingDistributedDilatedAttention", "DilatedTransformerBlock"]


def by_hand(layer: MultiheadDilatedAttention, x: Tensor, count: Tensor) -> Tensor:
    """The layer by its definition: rows of the weight are q's heads, then k's, then v's."""
    q, k, v = (
        nn.functional.linear(x, weight, bias).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for weight, bias in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    )
    mixed = oracles.weighted_attention(q, k, v, count)
    return nn.functional.linear(mixed.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DILATED)
def test_against_the_definition(name: str, causal: bool) -> None:
    layer = getattr(kernels, name)(16, 4, [8, 20], [1, 2], causal=causal, dtype=torch.float64)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    count = oracles.dilated_counts(20, 4, [8, 20], [1, 2], causal=causal)
    assert torch.allclose(layer(x), by_hand(layer, x, count), rtol=0, atol=1e-12)


def test_block_sparse_against_the_definition() -> None:
    layer = kernels.BlockSparseRingDistributedDilatedAttention(
        16, 4, [8, 20], [1, 2], sparsity_ratio=0.5, block_size=2, dtype=torch.float64
    )
    x = torch.randn(2, 20, 16, dtype=torch.float64)

    def kept(rows: int) -> Tensor:
        return kernels.block_pattern("local", rows, block_size=2, sparsity_ratio=0.5)

    count = oracles.dilated_block_counts(20, 4, [(8, 1), (20, 2)], kept, 2)
    assert torch.allclose(layer(x), by_hand(layer, x, count), rtol=0, atol=1e-12)


def test_the_block_is_prenorm() -> None:
    block = DilatedTransformerBlock(16, 4, [8, 20], [1, 2], causal=True)
    x = torch.randn(2, 20, 16)
    between = x + block.attention(block.attention_norm(x))
    assert torch.allclose(block(x), between + block.mlp(block.mlp_norm(between)))


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_checkpoints(name: str) -> None:
    layer = getattr(kernels, name)(16, 4, [8, 20], [1, 2], causal=True)
    x = torch.randn(1, 20, 16)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    recomputed = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    mine, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (recomputed, layer(x)))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_built_on_meta_and_trained_under_autocast(name: str) -> None:
    layer = getattr(kernels, name)(16, 4, [8, 20], [1, 2], device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 20, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert torch.allclose(out.float(), layer(x), atol=0.1)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_the_seeds_name_is_an_alias() -> None:
    assert (
        kernels.DistributedImprovedMultiheadDilatedAttention is kernels.DistributedMultiheadDilatedAttention
    )


def test_a_group_without_sequence_parallel_is_refused() -> None:
    """It would be ignored, and each rank would attend to its own slice alone."""
    group = object()
    with pytest.raises(kernels.KernelError, match="sequence_parallel=True"):
        kernels.DistributedMultiheadDilatedAttention(16, 4, [8], [1], group=group)


def test_without_sequence_parallelism_nobody_is_asked() -> None:
    layer = kernels.DistributedMultiheadDilatedAttention(16, 4, [8], [1], sequence_parallel=False)
    assert layer.group is None
    assert layer(torch.randn(1, 9, 16)).shape == (1, 9, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16, 3, [8], [1]), "num_heads: a width of 16.*Got 3.*divisors of 16"),
        ((16, 0, [8], [1]), "num_heads"),
        ((16, 4, [8, 16], [1]), "one rate for each segment length"),
        ((16, 4, [0], [1]), r"segment_lengths\[0\]"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        MultiheadDilatedAttention(*arguments)


def test_bad_sparsity_is_said_when_building() -> None:
    with pytest.raises(KernelError, match="sparsity_ratio"):
        kernels.BlockSparseRingDistributedDilatedAttention(16, 4, [8], [1], sparsity_ratio=0)


@pytest.mark.parametrize("shape", [(20, 16), (1, 20, 15)])
def test_bad_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(KernelError, match=r"x: not a batch.*\(batch, length, 16\)"):
        MultiheadDilatedAttention(16, 4, [8], [1])(torch.randn(shape))
