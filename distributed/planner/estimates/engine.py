"""Engine: what the program that trains does in its own way, as far as the time of a step depends on it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OURS", "Engine"]


@dataclass(frozen=True)
class Engine:
    """Habits of a training program.

    Attributes:
        weight_bytes: bytes of an element of the weights that ranks exchange under ZeRO 1 and 2.
        gradient_bytes: bytes of an element of a gradient when it is reduced.
        gathered_bytes: bytes of an element of a sharded weight when it is gathered; None for those of the
            precision.
        overlap: share of the computation during which collectives of gradients and shards run.
        sends_exposed: share of the time of messages between stages during which a stage waits.
        sequence_parallel: whether ``tensor`` ranks hold slices of the sequence between their layers.
        cuts_embedding: whether ``tensor`` ranks have a part of the embedding and of the logits each.
        recomputed: share of the forward pass that activation checkpointing computes again.
        stages_per_rank: stages of a rank under schedules that have several.
        elementwise: memory traffic of elementwise operations, relative to the fused kernels of Megatron-LM.
    """

    weight_bytes: int = 4
    gradient_bytes: int = 4
    gathered_bytes: int | None = None
    overlap: float = 0.7
    sends_exposed: float = 0.5
    sequence_parallel: bool = False
    cuts_embedding: bool = True
    recomputed: float = 1.0
    stages_per_rank: int = 2
    elementwise: float = 1.0


OURS = Engine(elementwise=2.1, gathered_bytes=4, cuts_embedding=False)
"""The torch backends of this project without ``compile``: float32 weights, of which autocast takes 16-bit
copies after they were gathered, and operations one by one. ``elementwise`` is fitted on two runs of
torchtitan, with and without compilation (``python -m tests.benchmarks.planner_time``)."""
