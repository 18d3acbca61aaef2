"""Section `zero` of the configuration, and the field `deepspeed_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from distributed.config import NativeField, Section
from distributed_backends.deepspeed.native_config import NATIVE, take_native

if TYPE_CHECKING:
    from distributed.config import DistributedConfig

__all__ = ["ZeroSection", "native_config"]


class ZeroSection(Section):
    """What ZeRO keeps in host memory, so that more fits on a device."""

    native = NativeField(
        NATIVE,
        "DeepSpeed's own configuration: names and values, a JSON file, or DeepSpeedConfig. What is a field"
        " here it may not contradict.",
        read=take_native,
        wants_zero=True,
    )

    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="Where the optimizer's state lives and steps; cpu needs ZeRO stage 1 or more."
    )
    offload_parameters: Literal["none", "cpu"] = Field(
        "none", description="Where parameters wait until they are used; cpu needs ZeRO stage 3."
    )


def native_config(config: DistributedConfig) -> dict[str, Any]:
    """The field `deepspeed_config`; empty where it is not set."""
    return getattr(config, NATIVE) or {}
