"""Split: how a model and its global batch are divided over ranks, as far as predictions depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.interfaces.codec import DENSE
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.model_facts import WHOLE, Cut

__all__ = ["SGD_WITH_MOMENTUM", "Split", "describe"]

SGD_WITH_MOMENTUM = "sgd with momentum"
"""Name, for predictions by numbers, of SGD that keeps a momentum of each parameter."""


@dataclass(frozen=True)
class Split:
    """One row of the table of plans.

    Attributes:
        dims: number of ranks along each axis of the mesh.
        backend: name of the backend.
        zero_stage: what DeepSpeed shards over the ranks along ``data``: 1 the optimizer's state, 2 gradients
            too, 3 parameters too; 0 nothing.
        micro_batch: samples of one forward pass of a rank.
        num_micro_batches: forward passes of a rank in one optimizer step.
        schedule: order of forward and backward of a pipeline.
        activation_checkpointing: whether backward computes the activations of each block again.
        codec: name of the gradient codec.
        offload: whether the optimizer's state is in host memory.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: name of the optimizer.
    """

    dims: ParallelDims
    backend: str
    zero_stage: int = 0
    micro_batch: int = 1
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    activation_checkpointing: bool = False
    codec: str = "none"
    offload: bool = False
    precision: str = "fp32"
    optimizer: str = "adamw"

    def cut(self, stage: int = 0) -> Cut:
        """What part of the model the ranks of a stage have."""
        dims, copies = self.dims, self.dims.size("data", "context")
        return Cut(
            dims.tensor,
            dims.context,
            dims.expert,
            dims.pipeline,
            self.schedule if dims.pipeline > 1 else WHOLE.schedule,
            stage,
            *((self.codec, copies) if self.codec != DENSE and copies > 1 else ()),
        )


def describe(split: Split) -> str:
    """`split` in one line."""
    parts = [split.backend, str(split.dims), f"micro_batch {split.micro_batch} x {split.num_micro_batches}"]
    if split.dims.pipeline > 1:
        parts.append(split.schedule)
    parts += [name for name in ("activation_checkpointing", "offload") if getattr(split, name)]
    parts += [f"zero_stage {split.zero_stage}"] if split.zero_stage else []
    parts += [f"codec {split.codec}"] if split.codec != DENSE else []
    parts += [split.precision] if split.precision != "fp32" else []
    return ", ".join(parts)
