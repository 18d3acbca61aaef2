"""The order in which a rank of a pipeline computes, for schedules that do not divide backward."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["BACKWARD", "FORWARD", "LOOPED", "ONE_STAGE", "rank_order", "rank_stages", "stage_order"]

FORWARD, BACKWARD = "F", "B"

ONE_STAGE = ("gpipe", "1f1b")
"""Schedules that give each rank one stage."""
LOOPED = ("interleaved-1f1b", "looped-bfs")
"""Schedules that give each rank two stages or more, which lie as far apart as there are ranks."""
_PER_RANK = 2
"""Stages of a rank under a schedule of `LOOPED`, unless the configuration names more of them."""


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


def rank_stages(schedule: str, num_ranks: int, rank: int) -> range:
    """Indices of the stages of a rank."""
    return range(rank, num_ranks * (_PER_RANK if schedule in LOOPED else 1), num_ranks)


def rank_order(
    schedule: str, num_ranks: int, num_microbatches: int, rank: int
) -> Iterator[tuple[str, int, int]]:
    """(``F`` or ``B``, stage, micro-batch) of each computation of a rank, in order.

    Source: Narayanan et al., 2021 (arXiv:2104.04473); Lamy-Poirier, 2022 (arXiv:2211.05953); the numbers of
    micro-batches in a round and before the first backward are those of torch 2.13
    (torch/distributed/pipelining/schedules.py, ``ScheduleInterleaved1F1B`` and ``ScheduleLoopedBFS``).

    Args:
        schedule: of `ONE_STAGE` or `LOOPED`.
        num_ranks: ranks along the pipeline.
        num_microbatches: forward passes of a step.
        rank: index along the pipeline.
    """
    stages, number = rank_stages(schedule, num_ranks, rank), num_microbatches
    if schedule in ONE_STAGE:
        yield from ((kind, rank, m) for kind, m in stage_order(schedule, num_ranks, number, rank))
    elif schedule == "looped-bfs":
        yield from ((FORWARD, stage, m) for stage in stages for m in range(number))
        yield from ((BACKWARD, stage, m) for stage in reversed(stages) for m in reversed(range(number)))
    else:
        round_size = number // max(1, number // num_ranks)
        ahead = min((len(stages) - 1) * round_size + 2 * (num_ranks - 1 - rank), number * len(stages))
        forward = [(FORWARD, *entry) for entry in _in_rounds(stages, number, round_size)]
        backward = [(BACKWARD, *entry) for entry in _in_rounds(stages[::-1], number, round_size)]
        yield from forward[:ahead]
        for at, entry in enumerate(backward):
            yield from forward[ahead + at : ahead + at + 1]
            yield entry


def _in_rounds(stages: range, number: int, round_size: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch): a round of micro-batches through each stage, then the next round."""
    for start in range(0, number, round_size):
        yield from ((stage, m) for stage in stages for m in range(start, start + round_size))
