"""Divide a chain of blocks into stages of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["balance"]


def balance(
    costs: Sequence[float], num_stages: int, before: float = 0.0, after: float = 0.0
) -> tuple[list[int], float]:
    """Cut a chain into contiguous parts whose largest cost is least, by dynamic programming.

    Args:
        costs: of the blocks, in order.
        num_stages: parts, each with a block or more.
        before: what the first part has to compute besides.
        after: what the last part has to compute besides.

    Returns:
        (index of the first block of each part, the largest cost).

    Raises:
        ValueError: there are fewer blocks than parts.
    """
    count = len(costs)
    if count < num_stages:
        raise ValueError(f"{count} blocks cannot be cut into {num_stages} parts")
    sums = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return sums[end] - sums[start] + before * (start == 0) + after * (end == count)

    # best[end]: least largest cost of the first `end` blocks, and the start of the last part of them.
    best: list[tuple[float, int]] = [(cost(0, end) if end else float("inf"), 0) for end in range(count + 1)]
    starts: list[list[int]] = []
    for part in range(2, num_stages + 1):
        best = [
            min(
                ((max(best[start][0], cost(start, end)), start) for start in range(part - 1, end)),
                default=(float("inf"), 0),
            )
            for end in range(count + 1)
        ]
        starts.append([start for _, start in best])
    cuts, end = [], count
    for table in reversed(starts):
        end = table[end]
        cuts.append(end)
    return [0, *reversed(cuts)], best[count][0]
