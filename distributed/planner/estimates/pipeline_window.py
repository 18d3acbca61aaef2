"""Play the micro-batches of a rank of a pipeline in the order of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distributed.planner.estimates.layout import Layout, MicroBatch
from distributed.planner.estimates.model_facts import ModelFacts, Timeline
from distributed.planner.estimates.split import Split
from distributed.planner.stage_order import BACKWARD, FORWARD, INPUTS, WEIGHTS, rank_order

__all__ = ["StageLines", "place_buffers", "play_stages"]


class StageLines(NamedTuple):
    """Timelines of a stage.

    Attributes:
        whole: of the first micro-batch of a step, in which gradients are new, and of a later one.
        halves: the same with backward in two halves; None where no schedule divides it.
    """

    whole: tuple[Timeline, Timeline]
    halves: tuple[Timeline, Timeline] | None = None


def place_buffers(layout: Layout, stages: Sequence[ModelFacts], split: Split) -> None:
    """Allocate what the stages of a rank receive into: memory for each micro-batch, which lasts as long as
    the run.

    Source: torch/distributed/pipelining/stage.py of torch 2.13, ``_setup_forward_recv_info`` and
    ``_create_grad_recv_info``.
    """
    for facts in stages:
        for size in facts.received:
            for _ in range(split.num_micro_batches):
                layout.ledger.take("activations", size.at(split.micro_batch))


def play_stages(
    layout: Layout, stages: Sequence[ModelFacts], lines: Sequence[StageLines], split: Split
) -> None:
    """Forward and backward of all micro-batches of a rank.

    Args:
        layout: of the rank.
        stages: facts of the stages of the rank, in order.
        lines: of each stage.
        split: how the model is divided.
    """
    window = _Window(layout, stages, lines, split)
    for kind, stage, position in window.order:
        window.play(kind, stage, position)
    window.end()


class _Window:
    """The micro-batches of a step, and what is live of them longer than it is used.

    What was sent is live until the end of the step, unless the schedule is 1f1b. Under 1f1b a gradient is
    until the next one was computed, and the output of the last forward but one before the first backward
    until the end. Where a rank has two stages in a row, one becomes what the other receives into, in the
    place of that of the step before. The gradient of an input that was computed by itself is live until the
    next step begins. Source: torch/distributed/pipelining/schedules.py of torch 2.13, ``fwd_sends_to_wait``,
    ``bwd_sends`` and ``send_work`` in ``_step_microbatches``; ``send_ops`` in that of
    ``_PipelineScheduleRuntime``, for several stages on a rank; ``set_local_fwd_input``,
    ``set_local_bwd_input`` and ``clear_runtime_states`` in stage.py.
    """

    def __init__(
        self, layout: Layout, stages: Sequence[ModelFacts], lines: Sequence[StageLines], split: Split
    ) -> None:
        number, ranks, rank = split.num_micro_batches, split.dims.pipeline, stages[0].cut.stage
        self.order = list(rank_order(split.schedule, ranks, number, rank))
        self._layout, self._split = layout, split
        self._facts = {facts.cut.stage: facts for facts in stages}
        self._lines = {facts.cut.stage: own for facts, own in zip(stages, lines, strict=True)}
        self._new: dict[int, int] = {}  # the micro-batch of each stage whose gradients come first
        for kind, stage, position in self.order:
            if kind in (BACKWARD, WEIGHTS):
                self._new.setdefault(stage, position)
        self._divided = {(stage, position) for kind, stage, position in self.order if kind == INPUTS}
        self._keeps = split.schedule != "1f1b"
        self._kept_work = min(number, ranks - rank) - 2
        self._under_way: dict[tuple[int, int], MicroBatch] = {}
        self._sent: list[tuple[MicroBatch, list[int]]] = []

    def play(self, kind: str, stage: int, position: int) -> None:
        """One computation."""
        if kind == FORWARD:
            self._forward(stage, position)
        elif kind == WEIGHTS:
            self._layout.play_weights(self._under_way.pop((stage, position)), is_last=True)
        elif kind == INPUTS:
            micro_batch = self._under_way[stage, position]
            self._layout.play_inputs(micro_batch)
            self._hand_over(stage, micro_batch)
        else:
            micro_batch = self._under_way.pop((stage, position))
            self._layout.play_backward(micro_batch, is_last=True)
            self._hand_over(stage, micro_batch)

    def end(self) -> None:
        """All has arrived."""
        for micro_batch, tensors in self._sent:
            self._layout.let_go(micro_batch, tensors)

    def _forward(self, stage: int, position: int) -> None:
        is_divided = (stage, position) in self._divided
        own = self._lines[stage]
        pair = own.halves if is_divided else own.whole
        assert pair is not None
        line = pair[self._layout.adds_gradients and position != self._new[stage]]
        forward, backward = line.sent
        outputs = [forward] if self._keeps or position == self._kept_work else []
        held = [tensor for tensor in (*outputs, backward) if tensor is not None]
        micro_batch = self._under_way[stage, position] = MicroBatch(line, held)
        self._layout.play_forward(micro_batch)
        if stage + 1 in self._facts:
            self._replace(self._facts[stage + 1], 0)

    def _hand_over(self, stage: int, micro_batch: MicroBatch) -> None:
        """Send the gradient of an input, or give it to the stage before on the same rank."""
        forward, backward = micro_batch.timeline.sent
        if not self._keeps:
            for before, _ in self._sent:
                self._layout.let_go(before, [t for t in before.held if t != before.timeline.sent[0]])
        if stage - 1 in self._facts:
            self._replace(self._facts[stage - 1], 1)
        stays = {forward} if stage + 1 in self._facts else set()
        if stage - 1 in self._facts or micro_batch.weights:
            stays.add(backward)
        self._sent.append((micro_batch, [tensor for tensor in micro_batch.held if tensor not in stays]))

    def _replace(self, facts: ModelFacts, direction: int) -> None:
        """Free what a stage has received into in the step before."""
        self._layout.ledger.give("activations", facts.received[direction].at(self._split.micro_batch))
