"""Dilated attention at LongNet's segments: time and memory beside dense attention, growth, error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import distributed_kernels as kernels
import torch
from distributed_kernels.attention.dilated_copies import triton_runs
from torch import Tensor

from tests.gpu.checks import Measured, Settings
from tests.gpu.kernels import (
    BOUNDS,
    Contender,
    Function,
    compare,
    flash_attention,
    measure_memory,
    measure_time,
)
from tests.kernels import oracles

__all__ = ["growth", "halves", "length"]

_SEGMENT = 2048
"""LongNet's shortest segment; each further branch has twice the segment and twice the rate."""


def _branches(length: int, first: int) -> list[tuple[int, int]]:
    """LongNet's branches up to a segment of the whole length."""
    found = [(first, 1)]
    while found[-1][0] < length:
        width, rate = found[-1]
        found.append((2 * width, 2 * rate))
    return found


def _attention(branches: list[tuple[int, int]]) -> Function:
    widths, rates = zip(*branches, strict=True)
    return partial(kernels.dilated_attention, segment_lengths=widths, dilation_rates=rates, causal=True)


def _contender(setting: Settings, length: int, width: int, longest: int) -> Contender:
    """Causal dilated attention, and dense attention, of eight heads; a dry run takes a 64th of the length."""
    share = setting.pick(1, 64)
    dtype = setting.pick(torch.bfloat16, torch.float32)
    shape = (1, 8, length // share, width)
    leaves = [torch.randn(shape).to(setting.device, dtype).requires_grad_() for _ in range(3)]
    mine = _attention(_branches(longest // share, _SEGMENT // share))
    return Contender(mine, flash_attention, leaves)


def length(setting: Settings, length: int, width: int) -> Iterator[Measured]:
    """Time and memory of one length and head_dim, with branches up to the whole length."""
    torch.manual_seed(0)
    found = _contender(setting, length, width, length)
    timed = measure_time(setting, found)
    copies = "Triton" if triton_runs(torch.device(setting.device)) else "torch"
    host = _host_seconds(setting, found) * 1e3
    yield replace(timed, detail=f"{timed.detail}; copies by {copies}; {host:.2f} ms until all is launched")
    yield measure_memory(setting, found)


def _host_seconds(setting: Settings, found: Contender) -> float:
    """Median time in which the host launches forward and backward, without waiting for the device."""
    turns = []
    for _ in range(setting.pick(15, 2)):
        if setting.device != "cpu":
            torch.cuda.synchronize()
        start = perf_counter()
        out = found.mine(*found.leaves)
        out.backward(torch.ones_like(out))
        turns.append(perf_counter() - start)
        for leaf in found.leaves:
            leaf.grad = None
    return median(turns)


def growth(setting: Settings, short: int, long: int) -> Iterator[Measured]:
    """Time and memory for one position of the long sequence over those of the short one, same branches."""
    torch.manual_seed(0)
    kept = [_contender(setting, length, 64, short) for length in (long, short)]
    # The function of the long sequence on its leaves, beside that of the short one on its own.
    function = kept[0].mine
    pair = Contender(
        lambda *_: function(*kept[0].leaves), lambda *_: function(*kept[1].leaves), sum_of_leaves(kept)
    )
    times = long / short
    timed = measure_time(setting, pair)
    yield replace(timed, value=timed.value / times)
    peak = measure_memory(setting, pair)
    yield replace(peak, value=peak.value / times)


def sum_of_leaves(kept: list[Contender]) -> list[Tensor]:
    """Leaves of all of `kept`, so that the gradients of all are freed."""
    return [leaf for each in kept for leaf in each.leaves]


def halves(setting: Settings) -> Iterator[Measured]:
    """Error of half precision at eight heads, with the heads of a position side by side and apart."""
    torch.manual_seed(0)
    length = setting.pick(512, 64)
    branches = _branches(length, length // 8)
    count = oracles.dilated_counts(length, 8, *zip(*branches, strict=True), causal=True)
    oracle = partial(oracles.weighted_attention, count=count)
    found = {}
    for dtype in setting.pick([torch.float16, torch.bfloat16], [torch.bfloat16]):
        for apart in (True, False):
            x = torch.randn(3, 2, 8, length, 64).to(setting.device, dtype)
            x = x if apart else x.transpose(2, 3).contiguous().transpose(2, 3)
            leaves = [each.detach().requires_grad_() for each in x.unbind(0)]
            error = compare(_attention(branches), oracle, leaves)
            found[f"{str(dtype)[6:]} {'apart' if apart else 'side by side'}"] = (error, error / BOUNDS[dtype])
    worst = torch.tensor([share for _, share in found.values()], dtype=torch.float64).amax()
    yield Measured(float(worst), ", ".join(f"{name} {error:.1e}" for name, (error, _) in found.items()))
