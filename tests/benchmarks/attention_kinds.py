"""What the other attention functions cost: beside dense attention, and spread over ranks.

    OMP_NUM_THREADS=1 python tests/benchmarks/attention_kinds.py [--length 4096]
    OMP_NUM_THREADS=1 python tests/benchmarks/attention_kinds.py --ranks 4 [--length 4096]

The first table compares forward and backward with torch's `scaled_dot_product_attention` in one process,
taking turns; the median over turns, in the thread's CPU time. The second runs each function on gloo ranks
of this host: work of the busiest rank beside an equal share of the whole, which is what a rank of its own
core would take while messages arrive in time, and the bytes each rank receives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import distributed_kernels as kernels
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_kernels import count_traffic
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, WIDTH, TURNS = 8, 64, 5
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def leaves(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3)]


def seconds(attention: Attention, inputs: list[Tensor]) -> float:
    """CPU seconds of this thread for forward and backward."""
    qkv = [x.detach().clone().requires_grad_() for x in inputs]
    start = time.thread_time()
    attention(*qkv).sum().backward()
    return time.thread_time() - start


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return kernels.attention_with_lse(q, k, v, causal=causal)[0]


def both_outputs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out, lse = kernels.attention_with_lse(q, k, v, causal=causal)
    return out + lse.unsqueeze(-1)


def alone(length: int) -> None:
    print("| function | causal | ideal | of dense, measured |")
    print("|---|---|---|---|", flush=True)
    for causal in (False, True):
        rows: list[tuple[str, float, Attention]] = [
            ("`attention_with_lse`", 1.0, partial(dense, causal=causal)),
            ("`attention_with_lse`, gradient of lse too", 1.0, partial(both_outputs, causal=causal)),
        ]
        for pattern in ("local", "strided", "local+global"):
            mask = kernels.block_pattern(pattern, length, causal=causal)
            share = kernels.block_density(mask, causal=causal)
            options: dict[str, Any] = {"pattern": pattern, "causal": causal}
            function = partial(kernels.block_sparse_attention, **options)
            rows.append((f"`block_sparse_attention`, {pattern}, blocks of 64", share, function))
        compare(rows, causal, length)


def compare(rows: list[tuple[str, float, Attention]], causal: bool, length: int) -> None:
    inputs = leaves(length)
    baseline = partial(scaled_dot_product_attention, is_causal=causal)
    for name, ideal, function in rows:
        turns = [seconds(function, inputs) / seconds(baseline, inputs) for _ in range(TURNS)]
        print(f"| {name} | {'yes' if causal else 'no'} | {ideal:.3f} | {median(turns):.3f} |", flush=True)


def contenders(length: int, causal: bool) -> dict[str, tuple[Callable[..., Tensor], Attention]]:
    """For each name, the function over ranks and the same work in one process."""
    segments: dict[str, Any] = {
        "segment_lengths": [length // 8, length // 2, length],
        "dilation_rates": [1, 2, 4],
        "causal": causal,
    }
    whole = partial(dense, causal=causal)
    ring = partial(kernels.ring_attention, causal=causal)
    dilated = partial(kernels.dilated_attention, **segments)
    sparse = partial(kernels.block_sparse_attention, causal=causal)
    return {
        "`ring_attention`, zigzag": (partial(ring, layout="zigzag"), whole),
        "`ring_attention`, contiguous": (partial(ring, layout="contiguous"), whole),
        "`ulysses_attention`": (partial(kernels.ulysses_attention, causal=causal), whole),
        "`dilated_attention`": (dilated, dilated),
        "`block_sparse_attention`": (sparse, sparse),
    }


def on_a_rank(rank: int, size: int, length: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    inputs = [x.chunk(size, 2)[rank] for x in leaves(length)]
    for causal in (False, True):
        for name, (across, by_itself) in contenders(length, causal).items():
            if not causal and "contiguous" in name:
                continue
            function = partial(across, group=dist.group.WORLD)
            with count_traffic() as traffic:
                seconds(function, inputs)
            mine = median([seconds(function, inputs) for _ in range(TURNS)])
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, mine)
            if rank == 0:
                share = median([seconds(by_itself, leaves(length)) for _ in range(3)]) / size
                busiest, mean = max(everyone) / share, sum(everyone) / size / share
                print(
                    f"| {name} | {'yes' if causal else 'no'} | {busiest:.2f} | {mean:.2f} |"
                    f" {traffic.received / 2**20:.1f} MiB |",
                    flush=True,
                )
            dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--ranks", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.ranks is None:
        alone(arguments.length)
        return
    print("| function | causal | busiest rank | mean rank | received by rank 0 |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_a_rank, (arguments.ranks, arguments.length, folder), arguments.ranks)


if __name__ == "__main__":
    main()
