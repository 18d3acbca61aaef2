"""Play the micro-batches of a stage of a pipeline in the order of its schedule."""

from __future__ import annotations

from distributed.planner.estimates.layout import Layout, MicroBatch
from distributed.planner.estimates.model_facts import ModelFacts, Timeline
from distributed.planner.estimates.split import Split
from distributed.planner.stage_order import FORWARD, stage_order

__all__ = ["place_buffers", "play_stages"]


def place_buffers(layout: Layout, facts: ModelFacts, split: Split) -> None:
    """Allocate what a stage receives into: memory for each micro-batch, which lasts as long as the run.

    Source: torch/distributed/pipelining/stage.py of torch 2.13, ``_setup_forward_recv_info`` and
    ``_create_grad_recv_info``.
    """
    for size in facts.received:
        for _ in range(split.num_micro_batches):
            layout.ledger.take("activations", size.at(split.micro_batch))


def play_stages(layout: Layout, first: Timeline, later: Timeline, split: Split) -> None:
    """Forward and backward of all micro-batches of the stage.

    What was sent is live longer than it is used: under gpipe until the end of the step. Under 1f1b a gradient
    is until the next one was computed, and the output of the last forward but one before the first backward
    until the end. Source: torch/distributed/pipelining/schedules.py of torch 2.13, ``fwd_sends_to_wait``,
    ``bwd_sends`` and ``send_work`` in ``_step_microbatches``.

    Args:
        layout: of the rank.
        first: timeline of the first micro-batch of a step, in which gradients are new.
        later: of each later one.
        split: how the model is divided.
    """
    number, keeps = split.num_micro_batches, split.schedule == "gpipe"
    under_way: dict[int, MicroBatch] = {}
    sent: list[MicroBatch] = []
    stage, ranks = layout.facts.cut.stage, split.dims.pipeline
    kept_work = min(number, ranks - stage) - 2
    for kind, position in stage_order(split.schedule, ranks, number, stage):
        if kind == FORWARD:
            line = later if position and layout.adds_gradients else first
            forward, backward = line.sent
            outputs = [forward] if keeps or position == kept_work else []
            held = [tensor for tensor in (*outputs, backward) if tensor is not None]
            under_way[position] = MicroBatch(line, held)
            layout.play_forward(under_way[position])
            continue
        micro_batch = under_way.pop(position)
        layout.play_backward(micro_batch, is_last=True)
        if not keeps:
            for before in sent:
                layout.let_go(before, [tensor for tensor in before.held if tensor != before.timeline.sent[0]])
        sent.append(micro_batch)
    for micro_batch in sent:
        layout.let_go(micro_batch, micro_batch.held)
