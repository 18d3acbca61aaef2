"""Section `horovod` of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from distributed.config import Section

__all__ = ["HorovodSection"]


class HorovodSection(Section):
    """What only Horovod has. Another backend refuses it."""

    compression: Literal["none", "fp16"] = Field(
        "none",
        description="How gradients travel; fp16 halves float32's bytes, and rounds.",
    )
    timeline: str | None = Field(None, description="File for Horovod's timeline (chrome trace), by rank 0.")

    @field_validator("compression", mode="before")
    @classmethod
    def _horovods_own(cls, value: Any) -> Any:
        name = getattr(value, "__name__", None)
        return {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, value) if name else value
