"""Section `parallel` of the configuration: how the ranks divide samples and model between them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from distributed.config.sections import Section

_OF_PIPELINE = ("schedule", "num_microbatches", "stages")


class ParallelSection(Section):
    """Number of ranks along each axis of the mesh. The product of all axes is the number of ranks. One of
    `data` and `shard` may be left out; it takes the remaining ranks."""

    data: PositiveInt | None = Field(
        None,
        description="Ranks with different samples and the same part of the model. None: the remaining ranks;"
        " under `fsdp` 1.",
    )
    shard: PositiveInt | None = Field(
        None,
        description="Ranks with different samples, over which the model is sharded. None: under `fsdp` the"
        " remaining ranks, otherwise 1.",
    )
    tensor: PositiveInt = Field(1, description="Ranks that divide each layer between them.")
    pipeline: PositiveInt = Field(1, description="Ranks that hold different layers.")
    context: PositiveInt = Field(1, description="Ranks that hold slices of each sequence.")
    expert: PositiveInt = Field(
        1, description="Ranks, within those with different samples, that hold different experts."
    )
    tensor_plan: dict[str, str] = Field(
        default_factory=dict,
        description="How `tensor` divides modules: pattern of module names -> word, such as"
        " {'layers.*.mlp.up': colwise}. Empty: the model's own `_tp_plan`, else pairs of linear layers.",
    )
    schedule: (
        Literal[
            "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"
        ]
        | None
    ) = Field(None, description="Order of forward and backward in a pipeline. None: 1f1b.")
    num_microbatches: PositiveInt | None = Field(
        None,
        description="Pieces of each micro-batch that are in the pipeline at a time. None: the fewest that the"
        " schedule accepts.",
    )
    stages: tuple[str, ...] = Field(
        (), description="Names of the modules with which the pipeline's stages begin. Empty: of equal cost."
    )
    context_attention: Literal["auto", "ring", "ulysses", "dilated", "block-sparse"] = Field(
        "auto",
        description="How the ranks of `context` compute attention together. auto: as the model's own modules"
        " do; else ring, or ulysses for lengths that ring cannot cut.",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in _OF_PIPELINE:
            if self.pipeline == 1 and getattr(self, name):
                raise ValueError(f"{name} has no meaning with pipeline=1: set pipeline, or leave {name} out")
        if self.context == 1 and self.context_attention != "auto":
            raise ValueError("context_attention has no meaning with context=1: set context, or leave it out")
        return self
