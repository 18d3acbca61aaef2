"""The order in which each rank of a pipeline computes, and how long a step takes in it.

The orders of schedules with several stages on a rank are torch's own; those of gpipe and 1f1b, which torch
does not keep as lists, are written out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from distributed.parallel.pipeline_schedule import CLASSES
from distributed.planner.pipeline import PipelineShape
from distributed.planner.stage_order import stage_order

__all__ = ["Action", "Span", "bubble_of", "order_of", "simulate"]

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": INPUTS,
    "BACKWARD_WEIGHT": WEIGHTS,
}
"""torch's names of actions (2.13)."""


class Action(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: ``F`` forward, ``B`` backward, ``I`` gradients of activations, ``W`` gradients of weights.
        stage: index of the stage.
        micro_batch: index of the micro-batch.
    """

    kind: str
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """An action with its time.

    Attributes:
        action: what was computed.
        start: when it began.
        end: when it ended.
    """

    action: Action
    start: float
    end: float


def order_of(shape: PipelineShape) -> dict[int, list[Action]]:
    """Rank along the axis -> its actions, in order."""
    if shape.num_stages == shape.num_ranks:
        return {rank: _single(shape, rank) for rank in range(shape.num_ranks)}
    return {rank: list(_flat(actions)) for rank, actions in _torch_order(shape).items()}


def simulate(
    order: Mapping[int, Sequence[Action]],
    shape: PipelineShape,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> dict[int, list[Span]]:
    """When each action begins and ends, if communication takes no time.

    Args:
        order: of each rank.
        forward: time of a forward pass through one stage.
        inputs: time of the gradients of activations.
        weights: time of the gradients of weights.

    Raises:
        ValueError: the order waits for itself.
    """
    times = {FORWARD: forward, INPUTS: inputs, WEIGHTS: weights, BACKWARD: inputs + weights}
    done: dict[Action, float] = {}
    spans: dict[int, list[Span]] = {rank: [] for rank in order}
    left = {rank: list(actions) for rank, actions in order.items()}
    while any(left.values()):
        before = len(done)
        for rank, actions in left.items():
            while actions and (ready := _ready(actions[0], done, shape.num_stages)) is not None:
                action = actions.pop(0)
                start = max(ready, spans[rank][-1].end if spans[rank] else 0.0)
                done[action] = start + times[action.kind]
                spans[rank].append(Span(action, start, done[action]))
        if len(done) == before:
            raise ValueError(f"no rank can go on: {[actions[0] for actions in left.values() if actions]}")
    return spans


def bubble_of(spans: Mapping[int, Sequence[Span]]) -> float:
    """Share of the time from the first action to the last in which ranks do not compute."""
    start = min(span.start for own in spans.values() for span in own)
    end = max(span.end for own in spans.values() for span in own)
    busy = sum(span.end - span.start for own in spans.values() for span in own)
    return 1.0 - busy / ((end - start) * len(spans))


def _single(shape: PipelineShape, rank: int) -> list[Action]:
    """One stage on each rank."""
    order = stage_order(shape.schedule, shape.num_ranks, shape.num_microbatches, rank)
    return [Action(kind, rank, micro_batch) for kind, micro_batch in order]


def _torch_order(shape: PipelineShape) -> dict[int, list[Any]]:
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=shape.num_stages,
            group_size=shape.num_ranks,
            group_rank=0,
            is_last=index == shape.num_stages - 1,
            submod=None,
        )
        for index in shape.stages_of(0)
    ]
    order: dict[int, list[Any]] = CLASSES[shape.schedule](stages, shape.num_microbatches).pipeline_order
    return order


def _flat(actions: Sequence[Any]) -> Iterator[Action]:
    for action in actions:
        if action is not None and action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action is not None and action.computation_type.name in _KINDS:
            yield Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def _ready(action: Action, done: Mapping[Action, float], num_stages: int) -> float | None:
    """When what `action` takes is there; None if that is not known yet."""
    kind, stage, micro = action
    if kind == WEIGHTS:
        return done.get(Action(INPUTS, stage, micro))
    if kind == FORWARD:
        return 0.0 if stage == 0 else done.get(Action(FORWARD, stage - 1, micro))
    if stage == num_stages - 1:
        return done.get(Action(FORWARD, stage, micro))
    after = done.get(Action(BACKWARD, stage + 1, micro), done.get(Action(INPUTS, stage + 1, micro)))
    own = done.get(Action(FORWARD, stage, micro))
    return None if after is None or own is None else max(after, own)
