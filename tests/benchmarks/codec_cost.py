"""Time that a gradient codec takes by itself on one rank, as a ratio to one ``torch.add`` of the same size.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.codec_cost

A wire of one process returns the rank's own payload for the other one, so that encoding, decoding, the
residual and the copies of an exchange between two ranks remain, without a network. A codec and ``torch.add``
take turns; medians of the thread's CPU time, which other processes of the host disturb least.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median
from time import thread_time

import torch
from torch import Tensor

from distributed.communication.coded_sum import CodedSum
from distributed.communication.wire import Reply
from distributed.config.compression import CompressionSection
from distributed.registry.catalog import get_catalog, load_target

_COLUMNS = 1000
"""Gradients are matrices of as many columns, so that PowerSGD has factors."""


class OwnPayload:
    """A `Wire` of two ranks, of which the other sends what this one sends."""

    rank, size = 0, 2

    def sum(self, values: Tensor) -> Reply:
        """Twice the values."""
        return lambda: values.mul_(2)

    def gather(self, payload: Tensor) -> Reply:
        """The payload twice."""
        return lambda: torch.stack([payload, payload])

    def scatter(self, parts: Tensor) -> Reply:
        """This rank's rows twice."""
        return lambda: torch.stack([parts[0], parts[0]])


def seconds(function: Callable[[], object]) -> float:
    """CPU time of one call in this thread."""
    start = thread_time()
    function()
    return thread_time() - start


def coded_sum(codec: str) -> CodedSum:
    """A codec with its default options."""
    spec, options = get_catalog().codecs[codec], CompressionSection()
    made = load_target(spec.target)(options, spec.feeds_back(options))
    return CodedSum(made, OwnPayload(), seed=0, revocable=False, names=["w"])


def exchange(summed: CodedSum, gradient: Tensor) -> None:
    """One step."""
    summed.begin({"w": gradient}).finish()
    summed.settle(skipped=False)


def cost(codec: str, gradient: Tensor, repeats: int) -> tuple[list[float], float]:
    """(seconds of each ``torch.add``, time of a step over their median)."""
    out, summed = torch.empty_like(gradient), coded_sum(codec)
    adds, steps = [], []
    for turn in range(repeats + 1):
        own = gradient.clone()
        add = seconds(lambda: torch.add(gradient, gradient, out=out))
        step = seconds(lambda: exchange(summed, own))  # noqa: B023 - called at once
        if turn:  # the first has no residual yet
            adds.append(add)
            steps.append(step)
    return adds, median(steps) / median(adds)


def ratios(numel: int, repeats: int) -> tuple[float, dict[str, float]]:
    """(seconds of one ``torch.add``, codec -> time of a step over that)."""
    gradient = torch.randn(numel // _COLUMNS, _COLUMNS)
    adds: list[float] = []
    found = {}
    for codec in get_catalog().codecs:
        own, found[codec] = cost(codec, gradient, repeats)
        adds += own
    return median(adds), found


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    results = [ratios(millions * 10**6, given.repeats) for millions in given.millions]
    print("| codec |", " | ".join(f"{millions} M" for millions in given.millions), "|")
    print("|---|" + "---|" * len(results))
    print("| `torch.add`, ms |", " | ".join(f"{unit * 1e3:.3g}" for unit, _ in results), "|")
    for codec in sorted(get_catalog().codecs):
        print(f"| `{codec}` |", " | ".join(f"{found[codec]:.3g}" for _, found in results), "|")


if __name__ == "__main__":
    main()
