"""Section `compression` of the configuration: what the ranks send of their gradients."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from distributed.config.sections import Section


class CompressionSection(Section):
    """Compression of the gradients that ranks with different samples exchange. All codecs but `none` change
    what is trained: see the page on communication."""

    codec: str = Field(
        "none",
        description="How gradients are sent: none, fp16, bf16, int8, fp8, top-k, random-k, powersgd, or a"
        " codec that a plugin registers.",
        json_schema_extra={"flag": "--compression"},
    )
    ratio: float = Field(
        0.01,
        gt=0.0,
        le=1.0,
        description="Share of the elements of each parameter that `top-k` and `random-k` send.",
    )
    rank: PositiveInt = Field(
        4, description="Rank of the two factors that `powersgd` sends instead of a matrix."
    )
    error_feedback: bool | None = Field(
        None,
        description="Add what was not sent to the next step's gradient. None: true for codecs that leave out"
        " part of a gradient, false for those that round each element.",
    )
