"""The order in which a rank with one stage of a pipeline computes."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["BACKWARD", "FORWARD", "ONE_STAGE", "stage_order"]

FORWARD, BACKWARD = "F", "B"

ONE_STAGE = ("gpipe", "1f1b")
"""Schedules that give each rank one stage."""


def stage_order(
    schedule: str, num_ranks: int, num_microbatches: int, stage: int
) -> Iterator[tuple[str, int]]:
    """(``F`` or ``B``, micro-batch) of each computation of a stage, in order.

    Source: Huang et al., 2019 (arXiv:1811.06965); Narayanan et al., 2019 (PipeDream-Flush, arXiv:2006.09503).

    Args:
        schedule: of `ONE_STAGE`.
        num_ranks: ranks along the pipeline.
        num_microbatches: forward passes of a step.
        stage: index of the stage.
    """
    number = num_microbatches
    ahead = number if schedule == "gpipe" else min(number, num_ranks - stage)
    yield from ((FORWARD, m) for m in range(ahead))
    for m in range(number):
        yield BACKWARD, m
        if ahead + m < number:
            yield FORWARD, ahead + m
