"""Accuracy of low-rank layers from a dense teacher, and what a weight loses when it is converted.

    OMP_NUM_THREADS=1 python tests/benchmarks/sketched_quality.py

First table: a linear teacher with independent entries, 128 -> 128; students train from scratch with Adam on
fresh inputs, and the figure is their mean squared error over that of answering zero, after training.
Second table: relative errors ||W - W^|| / ||W|| of converting a 512 x 512 weight.
"""

from __future__ import annotations

import argparse

import torch
from distributed_kernels import SKLinear, factorize_linear, sketch_signs
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH, ROWS = 128, 256


def train(student: nn.Module, teacher: Tensor, steps: int) -> float:
    """Relative mean squared error after `steps` steps; the rate falls to zero."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        optimizer.zero_grad()
        mse_loss(student(x), x @ teacher.T).backward()
        optimizer.step()
        schedule.step()
    x = torch.randn(20 * ROWS, WIDTH, generator=generator)
    with torch.no_grad():
        return float(mse_loss(student(x), x @ teacher.T) / (x @ teacher.T).square().mean())


def from_scratch(steps: int) -> None:
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    energy = torch.linalg.svdvals(teacher).square()
    torch.manual_seed(0)
    students = {
        "dense": nn.Linear(WIDTH, WIDTH),
        "rank 48, half frozen": SKLinear(WIDTH, WIDTH, 48, train_both=False),
        "rank 24, both trained": SKLinear(WIDTH, WIDTH, 24),
        "rank 48, both trained": SKLinear(WIDTH, WIDTH, 48),
    }
    print("| student | weights trained | FLOPs forward | error | least for its rank |")
    print("|---|---|---|---|---|")
    for name, student in students.items():
        trained = sum(p.numel() for n, p in student.named_parameters() if n != "bias")
        share, least = 1.0, 0.0
        if isinstance(student, SKLinear):
            share, least = student.flops(1) / student.dense_flops(1), energy[student.rank :].sum()
        print(
            f"| {name} | {trained:,} | {share:.3f} | {train(student, teacher, steps):.3f} |"
            f" {least / energy.sum():.3f} |",
            flush=True,
        )


def panthers_start(weight: Tensor, rank: int) -> Tensor:
    """(W U1^T U1 + U2 U2^T W) / 2, unbiased."""
    size = len(weight)
    u1, u2 = (sketch_signs(seed, (rank, size)) / rank**0.5 for seed in (0, 1))
    return (weight @ u1.T @ u1 + u2.T @ u2 @ weight) / 2


def converted() -> None:
    print("\n| 512 x 512 | random projection, 64 + 64 | least squares, 64 + 64 | SVD, 64 | SVD, 128 |")
    print("|---|---|---|---|---|")
    size, half = 512, 64
    gaussian = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(gaussian)
    falling = u / torch.arange(1, size + 1) @ vt
    for name, weight in (("independent entries", gaussian), ("singular values 1 / i", falling)):
        frozen = SKLinear(size, size, 2 * half, train_both=False)
        frozen.fit_weight(weight, keep_norm=False)
        dense = nn.Linear(size, size, bias=False)
        dense.weight.data = weight
        ranks = [factorize_linear(dense, rank).report.weight_error for rank in (half, 2 * half)]
        errors = [(w.detach() - weight).norm() / weight.norm() for w in (
            panthers_start(weight, half), frozen.dense_weight(),
        )]  # fmt: skip
        print(f"| {name} | " + " | ".join(f"{float(e):.3f}" for e in (*errors, *ranks)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    from_scratch(parser.parse_args().steps)
    converted()


if __name__ == "__main__":
    main()
