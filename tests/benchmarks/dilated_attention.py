"""Dilated attention beside dense attention: forward and backward, and what a long sequence costs.

    OMP_NUM_THREADS=1 python tests/benchmarks/dilated_attention.py --speed [--lengths 2048 8192 32768]
    OMP_NUM_THREADS=1 python tests/benchmarks/dilated_attention.py --linear

Both contenders live in one process and take turns; a figure is the median over turns, in the thread's CPU
time. "ideal" is the ratio of their numbers of (query, key) pairs, which is that of their FLOPs. For the
second table every length is a process of its own, whose peak memory is its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from distributed_kernels import dilated_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, WIDTH = 8, 64
SETTINGS = {
    2048: ([512, 1024, 2048], [1, 2, 4]),
    8192: ([1024, 2048, 4096, 8192], [1, 2, 4, 8]),
    32768: ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]),
}
"""Segments and rates double from branch to branch, up to the whole sequence."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def pairs(length: int, lengths: Sequence[int], rates: Sequence[int], causal: bool) -> int:
    """(query, key) pairs of one head; lengths and rates divide."""
    total = 0
    for width, rate in zip(lengths, rates, strict=True):
        kept = width // rate
        total += length // width * (kept * (kept + 1) // 2 if causal else kept * kept)
    return total


def leaves(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator).requires_grad_() for _ in range(3)]


def one_turn(attention: Attention, qkv: list[Tensor], dout: Tensor) -> tuple[float, float]:
    """CPU seconds of forward and of backward."""
    start = time.thread_time()
    out = attention(*qkv)
    between = time.thread_time()
    torch.autograd.grad(out, qkv, dout)
    return between - start, time.thread_time() - between


def turns_of(length: int) -> int:
    return {2048: 15, 8192: 5}.get(length, 2)


def speed(length: int, causal: bool) -> None:
    lengths, rates = SETTINGS[length]
    qkv = leaves(length)
    dout = torch.ones_like(qkv[0])
    contenders: list[Attention] = [
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
        lambda q, k, v: dilated_attention(q, k, v, lengths, rates, causal=causal),
    ]
    if length < max(SETTINGS):
        for attention in contenders:
            one_turn(attention, qkv, dout)
    times = [[one_turn(attention, qkv, dout) for attention in contenders] for _ in range(turns_of(length))]
    ideal = pairs(length, [length], [1], causal) / pairs(length, lengths, rates, causal)
    forward = median(dense[0] / ours[0] for dense, ours in times)
    both = median(sum(dense) / sum(ours) for dense, ours in times)
    seconds = [median(sum(turn[place]) for turn in times) for place in (0, 1)]
    print(
        f"| {length} | {'yes' if causal else 'no'} | {seconds[0]:.3f} s | {seconds[1]:.3f} s | {ideal:.2f} |"
        f" {forward:.2f} ({forward / ideal:.0%}) | **{both:.2f}** ({both / ideal:.0%}) |",
        flush=True,
    )


def long_setting(length: int) -> tuple[list[int], list[int]]:
    """Doubling up to the whole sequence: the sum of w / r^2 stays below twice the first segment."""
    lengths = [2048 << place for place in range(length.bit_length()) if 2048 << place <= length]
    return lengths, [1 << place for place in range(len(lengths))]


def linear(length: int) -> None:
    """One length, in a process of its own."""
    lengths, rates = long_setting(length)
    qkv = leaves(length)
    dout = torch.ones_like(qkv[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward, backward = one_turn(
        lambda q, k, v: dilated_attention(q, k, v, lengths, rates, causal=True), qkv, dout
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = (forward + backward) * 1e6 / length
    print(
        f"| {length // 1024}k | {len(lengths)} | {forward:.2f} s | {backward:.2f} s | {total:.0f} us |"
        f" {peak / 1024:.0f} MiB | {(peak - before) / length:.2f} KiB |"
        f" {4 * length**2 * HEADS / 2**30:.0f} GiB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        linear(arguments.one)
    if arguments.speed:
        print("| tokens | causal | dense | dilated | ideal | forward | forward + backward |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for length in arguments.lengths:
            for causal in (False, True):
                speed(length, causal)
    if arguments.linear:
        print(
            "| tokens | branches | forward | backward | per token | peak | of it, per token | scores, dense |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for length in (32768, 65536, 131072, 262144):
            subprocess.run([sys.executable, __file__, "--one", str(length)], check=True)


if __name__ == "__main__":
    main()
