"""Section `ring` of the configuration. Imported whenever plugins are listed, so it imports no framework."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from distributed import Section

__all__ = ["RingSection"]


class RingSection(Section):
    """How backend `ring` passes gradients on."""

    chunk_size: PositiveInt | None = Field(
        None,
        description="Most elements per exchange; None exchanges all gradients of a dtype at once.",
        json_schema_extra={"flag": "--ring-chunk-size"},
    )
    direction: Literal["right", "left"] = Field(
        "right",
        description="The neighbour to which a rank sends.",
        json_schema_extra={"flag": "--ring-direction"},
    )
