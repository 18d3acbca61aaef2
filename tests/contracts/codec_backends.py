"""`pytorch-ddp` with each gradient codec, as classes of the kit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distributed.testing.suite import Suite

__all__ = ["EVERYTHING", "LOSSY", "WithCodec", "fields"]

EVERYTHING: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"top-k": {"ratio": 1.0}, "random-k": {"ratio": 1.0}, "powersgd": {"rank": 1000}}
)
"""Codecs that can send everything -> the options with which they do."""
LOSSY: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{codec: {} for codec in ("fp16", "bf16", "int8", "fp8")},
        **{codec: {"ratio": 0.3} for codec in ("top-k", "random-k")},
        "powersgd": {"rank": 1},
    }
)


def fields(codec: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a trainer gets."""
    return {"compression.codec": codec} | {f"compression.{name}": value for name, value in options.items()}


class WithCodec(Suite):
    """The backend that all codecs have."""

    backend = "pytorch-ddp"
    lengths = range(1, 8)
