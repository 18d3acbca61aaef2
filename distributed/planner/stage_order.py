"""The order in which a rank of a pipeline computes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

__all__ = [
    "BACKWARD",
    "FOLDED",
    "FORWARD",
    "INPUTS",
    "LOOPED",
    "ONE_STAGE",
    "SPLIT",
    "WEIGHTS",
    "rank_order",
    "rank_stages",
    "stage_order",
]

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""Computations of a stage: forward, backward, and the two halves of backward."""

Order = Iterator[tuple[str, int, int]]

ONE_STAGE = ("gpipe", "1f1b")
"""Schedules that give each rank one stage."""
LOOPED = ("interleaved-1f1b", "looped-bfs")
"""Schedules that give each rank two stages or more, which lie as far apart as there are ranks."""
FOLDED = ("zbv", "dualpipev")
"""Schedules whose stages form a V: the first rank has the first and the last."""
SPLIT = ("interleaved-zero-bubble", *FOLDED)
"""Schedules that compute the gradients of weights apart from those of activations."""
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


def rank_stages(schedule: str, num_ranks: int, rank: int) -> Sequence[int]:
    """Indices of the stages of a rank."""
    if schedule in FOLDED:
        return rank, 2 * num_ranks - 1 - rank
    return range(rank, num_ranks * (1 if schedule in ONE_STAGE else _PER_RANK), num_ranks)


def rank_order(schedule: str, num_ranks: int, num_microbatches: int, rank: int) -> Order:
    """(computation, stage, micro-batch) of each computation of a rank, in order.

    Source: Narayanan et al., 2021 (arXiv:2104.04473); Lamy-Poirier, 2022 (arXiv:2211.05953); Qi et al., 2024
    (arXiv:2401.10241, 2405.15362); DeepSeek-AI, 2024 (arXiv:2412.19437). The numbers of micro-batches in a
    round and before the first backward are those of torch 2.13 (torch/distributed/pipelining/schedules.py).

    Args:
        schedule: of `ONE_STAGE`, `LOOPED` or `SPLIT`.
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
    elif schedule == "interleaved-zero-bubble":
        yield from _interleaved_in_halves(stages, num_ranks, number, rank)
    elif schedule == "zbv":
        found = _zero_bubble_v(stages, num_ranks, max(2 * num_ranks - 1, number), rank)
        yield from (entry for entry in found if entry[2] < number)
    elif schedule == "dualpipev":
        yield from _dual_pipe_v(stages, num_ranks, number, rank)
    else:
        round_size = number // max(1, number // num_ranks)
        ahead = min((len(stages) - 1) * round_size + 2 * (num_ranks - 1 - rank), number * len(stages))
        forward = [(FORWARD, *entry) for entry in _in_rounds(stages, number, round_size)]
        backward = [(BACKWARD, *entry) for entry in _in_rounds(stages[::-1], number, round_size)]
        yield from forward[:ahead]
        for at, entry in enumerate(backward):
            yield from forward[ahead + at : ahead + at + 1]
            yield entry


def _interleaved_in_halves(stages: Sequence[int], num_ranks: int, number: int, rank: int) -> Order:
    """The gradients of weights are as many computations late as there are ranks before this one."""
    round_size = number // max(1, number // num_ranks)
    ahead = min((len(stages) - 1) * round_size + num_ranks - 1 - rank, number * len(stages))
    forward = list(_in_rounds(stages, number, round_size))
    backward = list(_in_rounds(stages[::-1], number, round_size))
    yield from ((FORWARD, *entry) for entry in forward[:ahead])
    for at, entry in enumerate(backward):
        yield from ((FORWARD, *following) for following in forward[ahead + at : ahead + at + 1])
        yield INPUTS, *entry
        if at >= rank:
            yield WEIGHTS, *backward[at - rank]
    yield from ((WEIGHTS, *entry) for entry in backward[max(0, len(backward) - rank) :])


class _Counted:
    """Computations of stages, each with the next micro-batch of its kind."""

    def __init__(self) -> None:
        self._next: Counter[tuple[str, int]] = Counter()
        self.late: deque[tuple[int, int]] = deque()

    def number(self, kind: str, stage: int) -> int:
        """How many computations of a kind there were."""
        return self._next[kind, stage]

    def take(self, kind: str, stage: int) -> tuple[str, int, int]:
        """The next computation. A whole backward counts as the gradients of activations."""
        counted = INPUTS if kind == BACKWARD else kind
        found = kind, stage, self._next[counted, stage]
        self._next[counted, stage] += 1
        if kind == INPUTS:
            self.late.append(found[1:])
        return found

    def weights(self) -> Order:
        """The gradients of weights that have waited longest, if any have."""
        if self.late:
            yield WEIGHTS, *self.late.popleft()


def _zero_bubble_v(stages: Sequence[int], num_ranks: int, number: int, rank: int) -> Order:
    done, (first, last) = _Counted(), stages

    def both_halves(stage: int) -> Order:
        yield done.take(INPUTS, stage)
        yield done.take(WEIGHTS, stage)

    for _ in range(2 * (num_ranks - rank) - 1):
        yield done.take(FORWARD, first)
    for _ in range(rank):
        yield done.take(FORWARD, last)
        yield done.take(FORWARD, first)
    for _ in range(num_ranks - rank):
        yield done.take(FORWARD, last)
        yield from both_halves(last)
    while done.number(FORWARD, last) < number:
        if done.number(FORWARD, first) < number:
            yield done.take(FORWARD, first)
        yield from both_halves(first)
        yield done.take(FORWARD, last)
        yield from both_halves(last)
    for _ in range(rank):
        yield done.take(INPUTS, first)
        yield done.take(INPUTS, last)
    for _ in range(num_ranks - rank):
        yield from both_halves(first)
    for stage in (last, first):
        while done.number(WEIGHTS, stage) < number:
            yield done.take(WEIGHTS, stage)


def _dual_pipe_v(stages: Sequence[int], num_ranks: int, number: int, rank: int) -> Order:
    done, after, (first, last) = _Counted(), num_ranks - rank - 1, stages
    for _ in range(2 * after):
        yield done.take(FORWARD, first)
    for _ in range(rank + 1):
        yield done.take(FORWARD, first)
        yield done.take(FORWARD, last)
    for _ in range(after):
        yield done.take(INPUTS, last)
        yield from done.weights()
        yield done.take(FORWARD, last)
    for _ in range(number - 2 * num_ranks + rank + 1):
        yield done.take(FORWARD, first)
        yield done.take(BACKWARD, last)
        yield done.take(FORWARD, last)
        yield done.take(BACKWARD, first)
    for _ in range(after):
        yield done.take(BACKWARD, last)
        yield done.take(FORWARD, last)
        yield done.take(BACKWARD, first)
    # From the middle of what is left on, the gradients of weights fill the end.
    for at in range(2 * (rank + 1)):
        yield done.take(BACKWARD if at <= rank else INPUTS, (last, first)[at % 2])
    for _ in range(after):
        yield from done.weights()
        yield done.take(INPUTS, first)
    for _ in range(rank + 1):
        yield from done.weights()


def _in_rounds(stages: Sequence[int], number: int, round_size: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch): a round of micro-batches through each stage, then the next round."""
    for start in range(0, number, round_size):
        yield from ((stage, m) for stage in stages for m in range(start, start + round_size))
