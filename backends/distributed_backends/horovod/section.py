"""Section `horovod` of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from distributed.config import Section


class HorovodSection(Section):
    """Options of backend ``horovod``. Other backends reject them."""

    compression: Literal["none", "fp16"] = Field(
        "none",
        description="Another name of `compression.codec`, for fp16.",
    )
    timeline: str | None = Field(
        None, description="File for Horovod's timeline (Chrome trace), written by rank 0."
    )

    @field_validator("compression", mode="before")
    @classmethod
    def _horovods_own(cls, value: Any) -> Any:
        name = getattr(value, "__name__", None)
        return {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, value) if name else value
