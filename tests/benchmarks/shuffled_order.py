"""The shuffled order of a large dataset: time and memory until the first batch, beside ``torch.randperm``.

    python tests/benchmarks/shuffled_order.py [--samples N]

Each order is made in a process of its own, which reads the first 100 blocks of 8,192 samples, as a rank does.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import islice
from statistics import median
from typing import Any

import torch

from distributed.data.keyed_order import KeyedOrder
from distributed.data.order import epoch_seed

BLOCK, BLOCKS, TURNS = 8192, 100, 3


def measure(kind: str, samples: int) -> dict[str, float]:
    """Seconds to the first block and for each further sample, and MiB that the process grew by at most."""
    KeyedOrder(10, 0, 0)[:2]  # numpy's first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    order: Any
    if kind == "keyed":
        order = KeyedOrder(samples, 0, 0)
    else:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch_seed(0, 0)))
    blocks = (order[start : start + BLOCK] for start in range(0, samples, BLOCK))
    next(blocks)
    first = time.perf_counter() - begin
    for _ in islice(blocks, BLOCKS):
        pass
    rest = (time.perf_counter() - begin - first) / (BLOCKS * BLOCK)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"first": first, "next": rest, "MiB": grown / 1024}


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/shuffled_order.py")
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--kind", choices=["keyed", "randperm"], help="Measure one order in this process.")
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(measure(args.kind, args.samples)))
        return
    found: dict[str, dict[str, float]] = {}
    for kind in ("keyed", "randperm"):
        command = [sys.executable, __file__, "--kind", kind, "--samples", str(args.samples)]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(TURNS)]
        found[kind] = {name: median(run[name] for run in runs) for name in runs[0]}
        shown = found[kind]
        print(
            f"{kind}: {shown['first']:.4f} s to the first block, {shown['next'] * 1e9:.0f} ns for each"
            f" further sample, {shown['MiB']:.1f} MiB"
        )
    keyed, permuted = found["keyed"], found["randperm"]
    print(f"first block: {keyed['first'] / permuted['first']:.2g} of randperm's time")
    print(f"memory: {keyed['MiB'] / permuted['MiB']:.2g} of randperm's")


if __name__ == "__main__":
    main()
