"""What the other sketched layers cost: convolutions, conversion, signs, and a pair of layers cut over ranks.

    OMP_NUM_THREADS=1 python tests/benchmarks/sketched_kinds.py

One thread; contenders take turns, and a figure is the median over turns, in the thread's CPU time, of what
a contender takes over what its baseline took in the same turn. Ranks are gloo ranks of this host: work of
the busiest beside an equal share of the same layers in one process; messages travel in other threads.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_kernels import (
    SKColwiseParallel,
    SKConv2d,
    SKLinear,
    SKRowwiseParallel,
    factorize_linear,
    sketch_signs,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

TURNS = 9
BATCH, CHANNELS, PIXELS = 8, 128, 32
WIDTH, ROWS, RANK = 1024, 512, 64


def seconds(run: Callable[[], Any]) -> float:
    run()  # memory and caches are as the contender before left them
    start = time.thread_time()
    run()
    return time.thread_time() - start


def relative(run: Callable[[], Any], baseline: Callable[[], Any]) -> float:
    return median(seconds(run) / seconds(baseline) for _ in range(TURNS))


def train(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad()
    layer(x).sum().backward()


def convolutions() -> None:
    print("| SKConv2d, 128 to 128 channels | FLOPs, of dense | forward and backward, of `nn.Conv2d` |")
    print("|---|---|---|")
    x = torch.randn(BATCH, CHANNELS, PIXELS, PIXELS, requires_grad=True)
    dense = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    for rank in (16, 32, 64):
        layer = SKConv2d(CHANNELS, CHANNELS, 3, padding=1, rank=rank)
        ideal = layer.flops(1, backward=True) / layer.dense_flops(1, backward=True)
        taken = relative(partial(train, layer, x), partial(train, dense, x))
        print(f"| 3 x 3, rank {rank} | {ideal:.3f} | {taken:.3f} |", flush=True)


def conversions() -> None:
    print("\n| `factorize_linear`, 1024 x 1024 to rank 64 | time, of svd | output error | weight error |")
    print("|---|---|---|---|")
    linear = nn.Linear(WIDTH, WIDTH)
    inputs = torch.randn(4096, WIDTH) * torch.logspace(0, -2, WIDTH)
    covariance = inputs.T @ inputs / len(inputs)
    exact = partial(factorize_linear, linear, RANK, covariance=covariance)
    for method in ("svd", "rsvd", "activation"):
        report = exact(method=method).report
        taken = median(seconds(partial(exact, method=method)) / seconds(exact) for _ in range(3))
        print(
            f"| {method} | {taken:.2f} | {report.output_error:.3f} | {report.weight_error:.3f} |", flush=True
        )


def signs() -> None:
    shape = (WIDTH, WIDTH)
    taken = relative(partial(sketch_signs, 0, shape), partial(torch.randn, *shape))
    print(f"\n`sketch_signs` of 1024 x 1024 takes {taken:.1f} times as long as `torch.randn`.", flush=True)


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(SKLinear(WIDTH, 4 * WIDTH, RANK), nn.ReLU(), SKLinear(4 * WIDTH, WIDTH, RANK))


def on_a_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    cut = parallelize_module(pair(), mesh, {"0": SKColwiseParallel(), "2": SKRowwiseParallel()})
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    mine = median(seconds(partial(train, cut, x)) for _ in range(TURNS))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        share = median(seconds(partial(train, pair(), x)) for _ in range(TURNS)) / size
        # Half of each layer is cut: `factor_out` of the first, `factor_in` of the second.
        ideal = (WIDTH + 4 * WIDTH / size) / (5 * WIDTH / size)
        numbers = f"{ROWS * RANK:,} | {ROWS * WIDTH:,}"
        print(f"| {size} | {ideal:.2f} | {max(everyone) / share:.2f} | {numbers} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def over_ranks() -> None:
    print(
        "\n| ranks | FLOPs, of an equal share | busiest | numbers in an all-reduce | in one of dense layers |"
    )
    print("|---|---|---|---|---|", flush=True)
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_a_rank, (size, folder), size)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    convolutions()
    conversions()
    signs()
    over_ranks()


if __name__ == "__main__":
    main()
