"""Section `fsdp` of the configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from distributed.config import Section

__all__ = ["FSDPSection"]


class FSDPSection(Section):
    """What backend ``fsdp`` shards together, and what it trades for memory."""

    wrap: Literal["auto", "whole", "blocks", "size"] = Field(
        "auto",
        description="What is gathered together. blocks: each module of `block_classes`; size: each module"
        " of at least `min_params`; whole: the model at once; auto: the blocks the model names or repeats,"
        " else whole.",
    )
    block_classes: tuple[str, ...] = Field(
        (), description="Class names of the model's blocks, for wrap blocks and auto."
    )
    min_params: PositiveInt = Field(1_000_000, description="Parameters of a module that wrap size takes.")
    reshard_after_forward: bool = Field(
        True,
        description="Free gathered blocks between forward and backward, as ZeRO stage 3 does; false"
        " gathers once a step and keeps them, as stage 2.",
    )
    reduce_every_micro_batch: bool = Field(
        False,
        description="While accumulating, reduce each micro-batch's gradients at once: more communication,"
        " and no gradient of the whole model in memory.",
    )
    replicate: PositiveInt = Field(
        1, description="Copies of the sharded model: ranks / replicate share one (hybrid sharding)."
    )
    cpu_offload: bool = Field(
        False, description="Keep shards, gradients and optimizer in host memory, and step there."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype in which gradients travel; None is the parameters' own."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute the blocks' activations in backward instead of keeping them."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.wrap == "blocks" and not self.block_classes:
            raise ValueError("block_classes is missing: wrap=blocks needs the class names of the blocks")
        if self.wrap in ("whole", "size") and self.block_classes:
            raise ValueError(f"block_classes has no meaning with wrap={self.wrap}: use wrap=blocks")
        return self
