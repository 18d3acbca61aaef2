"""SKLinear against nn.Linear, and against Panther's sequence of operations, forward and backward.

    OMP_NUM_THREADS=1 python tests/benchmarks/sketched_linear.py [--rounds 40]

One thread. In every round each layer runs a few times, in another order of layers, the first of them not
counted; a figure is the median over rounds of its time over nn.Linear's in the same round. Times are the
thread's own processor time, which other work on the machine disturbs least. The gradient of the input is
computed, too, as inside a model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from distributed_kernels import SKLinear
from torch import Tensor, nn

SIZES = [(512, 1024, 1, 32), (512, 1024, 4, 16), (512, 2048, 4, 64), (512, 2048, 4, 128)]
"""Rows, features in and out, terms L, their rank k; the width of two GEMMs is 2 L k."""
WITHIN = 1.10
REPEATS = 6


class TermByTerm(torch.autograd.Function):
    """mean_i (x S1_i U1_i + x U2_i S2_i) / 2 + b with batched products over the terms, as Panther has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s1: Tensor, s2: Tensor, u1: Tensor, u2: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, s1, s2, u1, u2)
        each = x.expand(len(s1), *x.shape)
        return (each.bmm(s1).bmm(u1) + each.bmm(u2).bmm(s2)).mean(0).div(2) + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, s1, s2, u1, u2 = ctx.saved_tensors
        grad = (grads[0] / (2 * len(s1))).expand(len(s1), *grads[0].shape)
        inputs = x.expand(len(s1), *x.shape).mT
        inner = grad.bmm(u1.mT)
        grad_x = (inner.bmm(s1.mT) + grad.bmm(s2.mT).bmm(u2.mT)).sum(0)
        # Its own order is U2^T x^T g with the wide product last.
        return grad_x, inputs.bmm(inner), u2.mT.bmm(inputs).bmm(grad), None, None, grads[0].sum(0)


class Panther(nn.Module):
    """The layer around `TermByTerm`."""

    def __init__(self, width: int, terms: int, rank: int) -> None:
        super().__init__()
        self.s1 = nn.Parameter(torch.randn(terms, width, rank) / width**0.5)
        self.s2 = nn.Parameter(torch.randn(terms, rank, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        signs = [torch.randn(shape).sign() / rank**0.5 for shape in (self.s2.shape, self.s1.shape)]
        self.register_buffer("u1", signs[0])
        self.register_buffer("u2", signs[1])

    def forward(self, x: Tensor) -> Any:
        return TermByTerm.apply(x, self.s1, self.s2, self.u1, self.u2, self.bias)


def forward_only(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def both(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    for tensor in (x, *layer.parameters()):
        tensor.grad = None
    layer(x).backward(grad)


def seconds(run: Callable[..., None], layer: nn.Module, x: Tensor, grad: Tensor) -> float:
    run(layer, x, grad)  # memory and caches are as the layer before left them
    start = time.thread_time()
    for _ in range(REPEATS):
        run(layer, x, grad)
    return time.thread_time() - start


def measure(size: tuple[int, int, int, int], rounds: int) -> dict[str, tuple[float, float]]:
    """Layer -> (forward, forward and backward), relative to nn.Linear."""
    rows, width, terms, rank = size
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        "dense": nn.Linear(width, width),
        "frozen": SKLinear(width, width, num_terms=terms, low_rank=rank, allow_costly=True),
        "both": SKLinear(width, width, 2 * terms * rank, allow_costly=True),
        "panther": Panther(width, terms, rank),
    }
    x, grad = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
    found: dict[str, list[float]] = {name: [] for name in layers}
    for run in (forward_only, both):
        ratios: dict[str, list[float]] = {name: [] for name in layers}
        for number in range(rounds + 2):
            order = random.sample(list(layers), len(layers))
            times = {name: seconds(run, layers[name], x, grad) for name in order}
            if number >= 2:
                for name, taken in times.items():
                    ratios[name].append(taken / times["dense"])
        for name, values in ratios.items():
            found[name].append(statistics.median(values))
    return {name: (values[0], values[1]) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| rows, d = o, L, k | FLOPs, frozen | frozen | FLOPs, both | both trained | Panther's operations |"
    )
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        rows, width, terms, rank = size
        found = measure(size, args.rounds)
        cells = [", ".join(map(str, size))]
        for name, train_both in (("frozen", False), ("both", True)):
            layer = SKLinear(
                width, width, 2 * terms * rank, train_both=train_both, allow_costly=True, device="meta"
            )
            ideal = [
                layer.flops(rows, backward=b) / layer.dense_flops(rows, backward=b) for b in (False, True)
            ]
            cells.append(f"{ideal[0]:.3f} / {ideal[1]:.3f}")
            cells.append(
                " / ".join(
                    f"{f:.3f}" if f <= WITHIN * i else f"**{f:.3f}**"
                    for f, i in zip(found[name], ideal, strict=True)
                )
            )
        cells.append(" / ".join(f"{value:.3f}" for value in found["panther"]))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
