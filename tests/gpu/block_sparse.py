"""Block-sparse attention in one kernel: time and memory beside dense attention, and error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import distributed_kernels as kernels
import torch
from distributed_kernels.attention import block_kernels_flex
from distributed_kernels.attention.block_kernels import fuses_kept_blocks
from distributed_kernels.attention.block_kernels_reference import Block
from distributed_kernels.attention.patterns import KeptBlocks
from torch import Tensor

from tests.gpu.checks import NEEDS_GPU, Measured, Settings
from tests.gpu.kernels import (
    BOUNDS,
    Contender,
    compare,
    flash_attention,
    measure_memory,
    measure_time,
    relative,
)
from tests.kernels import oracles

__all__ = ["halves", "length", "parts"]

_DENSITY = 0.1


def length(
    setting: Settings, length: int, width: int, pattern: str = "local", block_size: int = 64
) -> Iterator[Measured]:
    """Time and memory of one length and head_dim; a dry run takes a 64th of the length."""
    torch.manual_seed(0)
    dtype = setting.pick(torch.bfloat16, torch.float32)
    shape = (1, 8, length // setting.pick(1, 64), width)
    leaves = [torch.randn(shape).to(setting.device, dtype).requires_grad_() for _ in range(3)]
    mine = partial(
        kernels.block_sparse_attention,
        pattern=pattern,
        block_size=block_size,
        sparsity_ratio=_DENSITY,
        causal=True,
    )
    found = Contender(mine, flash_attention, leaves)
    yield measure_time(setting, found)
    yield measure_memory(setting, found)


class _Case(NamedTuple):
    """A mask: positions, positions of a block, heads with masks of their own (0: one mask), heads of keys."""

    length: int
    block_size: int
    heads: int
    shared: int
    width: int


_CASES = (
    (_Case(512, 64, 0, 4, 64), True),
    (_Case(512, 64, 4, 1, 64), False),
    (_Case(1000, 128, 0, 2, 128), True),
    (_Case(430, 100, 4, 4, 40), True),
    (_Case(300, 8, 0, 4, 64), False),
)
"""Masks, and with the causal triangle or without. Each is a kernel that has to be compiled."""
_HALVES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16)


def _mask(case: _Case) -> Tensor:
    blocks = -(-case.length // case.block_size)
    return torch.rand((case.heads, blocks, blocks) if case.heads else (blocks, blocks)) < 0.4


def halves(setting: Settings) -> Iterator[Measured]:
    """Error of half precision: whole and cut tiles, short last blocks, masks of each head, shared heads, rows
    without a key."""
    torch.manual_seed(0)
    worst = 0.0
    given = [(case, dtype, causal) for (case, causal), dtype in zip(_CASES, _HALVES, strict=True)]
    errors: dict[str, float] = {}
    for case, dtype, causal in given[: setting.pick(None, 2)]:
        dtype = setting.pick(dtype, torch.float32)
        mask = _mask(case)
        count = oracles.block_counts(mask, case.length, case.block_size, causal=causal)
        mine = partial(
            kernels.block_sparse_attention,
            mask=mask.to(setting.device),
            block_size=case.block_size,
            causal=causal,
        )
        error = compare(mine, partial(_oracle, count=count), _leaves(setting, case, dtype))
        errors[f"{case.length}/{case.block_size} {str(dtype)[6:]}"] = error
        worst = max(worst, error / BOUNDS[dtype])
    yield Measured(worst, ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))


def _leaves(setting: Settings, case: _Case, dtype: torch.dtype) -> list[Tensor]:
    heads = (case.heads or 4, case.shared, case.shared)
    shapes = [(2, number, case.length, case.width) for number in heads]
    return [torch.randn(shape).to(setting.device, dtype).requires_grad_() for shape in shapes]


def _oracle(q: Tensor, k: Tensor, v: Tensor, count: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return oracles.weighted_attention(q, k, v, count)


def parts(setting: Settings) -> Iterator[Measured]:
    """Error of a part of a larger softmax, as a slice on a ring is one: (out, lse), and gradients from the
    whole output and lse."""
    if setting.device == "cpu":
        yield Measured(0.0, skipped=NEEDS_GPU)
        return
    torch.manual_seed(0)
    errors, dtype = [], torch.bfloat16
    for case, _ in _CASES[2:]:
        q, k, v = _leaves(setting, case._replace(shared=case.heads or 4), dtype)
        dout = torch.randn(q.shape).to(q)
        kept = KeptBlocks(_mask(case).to(setting.device), case.block_size, False)
        assert fuses_kept_blocks(q)
        count = kept.pairs(case.length, case.length).double()
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        out, lse = oracles.weighted_attention_with_lse(*exact, count)
        # A softmax that has as much weight again elsewhere, on values of 0.
        whole, wider = out.detach() / 2, lse.detach() + torch.log(torch.tensor(2.0))
        wanted = _gradients_of_part(exact, out, lse, dout.double(), whole, wider)
        block = Block(q.detach(), k.detach(), v.detach(), False, case.width**-0.5, kept=kept)
        found, found_lse = block_kernels_flex.forward(block)
        dead = lse == -torch.inf
        grads = block_kernels_flex.backward(
            block, dout, whole.to(dtype), wider.float().masked_fill(dead, torch.inf)
        )
        pairs = [(found, out), (found_lse.masked_fill(dead, 0), lse.masked_fill(dead, 0))]
        errors += [float(relative(*pair)) for pair in [*pairs, *zip(grads, wanted, strict=True)]]
    yield Measured(max(errors) / BOUNDS[dtype], f"bfloat16 {max(errors):.1e}")


def _gradients_of_part(
    leaves: list[Tensor], out: Tensor, lse: Tensor, dout: Tensor, whole: Tensor, wider: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v through this part alone, whose share of the whole softmax is exp(lse - wider)."""
    dead = lse == -torch.inf
    share = torch.exp(lse - wider).masked_fill(dead, 0.0).detach().unsqueeze(-1)
    # The derivative of the whole output by this part's lse is share * (out - whole).
    through_lse = (share * (out.detach() - whole) * dout).sum(-1)
    value = (share * out * dout).sum() + (lse.masked_fill(dead, 0.0) * through_lse).sum()
    return torch.autograd.grad(value, leaves)
