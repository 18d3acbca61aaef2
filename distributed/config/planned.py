"""Section `planned` of the configuration: what `plan` predicted for it."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from distributed.config.sections import Section

__all__ = ["PlannedSection"]


class PlannedSection(Section):
    """Predictions that `plan` wrote into this configuration. A run records them beside what it measures."""

    split: str | None = Field(
        None, description="The split that was predicted. A run with another split ignores the predictions."
    )
    hardware: str | None = Field(None, description="Name of the hardware profile.")
    step_seconds: PositiveFloat | None = Field(None, description="Predicted seconds of an optimizer step.")
    spread: NonNegativeFloat | None = Field(
        None, description="Half-width of the interval of `step_seconds`, relative to it."
    )
    memory_bytes: PositiveInt | None = Field(
        None,
        description="Predicted peak of the tensors of the rank that needs most, in bytes, without what"
        " libraries and allocator take.",
    )
