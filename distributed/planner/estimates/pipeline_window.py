"""Play the micro-batches of a rank of a pipeline in the order of its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.planner.estimates.layout import Layout, MicroBatch
from distributed.planner.estimates.model_facts import ModelFacts, Timeline
from distributed.planner.estimates.split import Split
from distributed.planner.stage_order import BACKWARD, FORWARD, rank_order

__all__ = ["place_buffers", "play_stages"]


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
    layout: Layout, stages: Sequence[ModelFacts], lines: Sequence[tuple[Timeline, Timeline]], split: Split
) -> None:
    """Forward and backward of all micro-batches of a rank.

    What was sent is live longer than it is used: until the end of the step, unless the schedule is 1f1b.
    Under 1f1b a gradient is until the next one was computed, and the output of the last forward but one
    before the first backward until the end. Source: torch/distributed/pipelining/schedules.py of torch 2.13,
    ``fwd_sends_to_wait``, ``bwd_sends`` and ``send_work`` in ``_step_microbatches``; ``send_ops`` in that of
    ``_PipelineScheduleRuntime``, for several stages on a rank.

    Args:
        layout: of the rank.
        stages: facts of the stages of the rank, in order.
        lines: of each stage: the timeline of the first micro-batch of a step, in which gradients are new, and
            of a later one.
        split: how the model is divided.
    """
    number, ranks, rank = split.num_micro_batches, split.dims.pipeline, stages[0].cut.stage
    order = list(rank_order(split.schedule, ranks, number, rank))
    own = dict(zip((facts.cut.stage for facts in stages), lines, strict=True))
    new: dict[int, int] = {}  # the micro-batch of each stage whose backward is the first
    for kind, stage, position in order:
        if kind == BACKWARD:
            new.setdefault(stage, position)
    keeps = split.schedule != "1f1b"
    kept_work = min(number, ranks - rank) - 2
    under_way: dict[tuple[int, int], MicroBatch] = {}
    sent: list[MicroBatch] = []
    for kind, stage, position in order:
        if kind == FORWARD:
            line = own[stage][layout.adds_gradients and position != new[stage]]
            forward, backward = line.sent
            outputs = [forward] if keeps or position == kept_work else []
            held = [tensor for tensor in (*outputs, backward) if tensor is not None]
            under_way[stage, position] = MicroBatch(line, held)
            layout.play_forward(under_way[stage, position])
            continue
        micro_batch = under_way.pop((stage, position))
        layout.play_backward(micro_batch, is_last=True)
        if not keeps:
            for before in sent:
                layout.let_go(before, [tensor for tensor in before.held if tensor != before.timeline.sent[0]])
        sent.append(micro_batch)
    for micro_batch in sent:
        layout.let_go(micro_batch, micro_batch.held)
