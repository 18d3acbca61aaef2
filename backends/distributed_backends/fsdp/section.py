"""Section `fsdp` of the configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from distributed.config import Section


class FSDPSection(Section):
    """Units of sharding and memory options of backend ``fsdp``."""

    wrap: Literal["auto", "whole", "blocks", "size"] = Field(
        "auto",
        description="Unit that is gathered at a time. blocks: each module of `block_classes`; size: each"
        " module with at least `min_params` parameters; whole: the model; auto: the modules of"
        " `block_classes`, else of the model's `_no_split_modules`, else the modules that have submodules and"
        " are repeated (same class) in a ModuleList or Sequential, else the whole model.",
    )
    block_classes: tuple[str, ...] = Field(
        (), description="Class names of the model's blocks, for wrap=blocks and wrap=auto."
    )
    min_params: PositiveInt = Field(
        1_000_000, description="Minimum number of parameters of a wrapped module, for wrap=size."
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free gathered parameters between forward and backward, as ZeRO stage 3; false gathers"
        " once per step and keeps them, as stage 2.",
    )
    reduce_every_micro_batch: bool = Field(
        False,
        description="Reduce gradients after each micro-batch of an accumulation: more communication, but no"
        " unsharded gradient in memory.",
    )
    replicate: PositiveInt = Field(
        1,
        description="Number of replicas of the sharded model; each is sharded over ranks / replicate (hybrid"
        " sharding).",
    )
    cpu_offload: bool = Field(
        False,
        description="Offload shards, gradients and optimizer state to host memory, and step on the CPU.",
    )
    param_dtype: Literal["bf16", "fp16"] | None = Field(
        None,
        description="dtype in which parameters are gathered, that of mixed_precision; half of the traffic,"
        " but parameters that autocast would use in float32 are rounded as well, so that the run is not equal"
        " to one of another backend. None: the dtype of the parameters.",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None,
        description="dtype of the gradient reduction; None: the dtype of the parameters, and fp32 beside"
        " param_dtype.",
    )
    activation_checkpointing: bool = Field(
        False, description="Older name of the flat field: true is activation_checkpointing=full."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.wrap == "blocks" and not self.block_classes:
            raise ValueError("block_classes is missing: wrap=blocks needs the class names of the blocks")
        if self.wrap in ("whole", "size") and self.block_classes:
            raise ValueError(f"block_classes has no meaning with wrap={self.wrap}: use wrap=blocks")
        return self
