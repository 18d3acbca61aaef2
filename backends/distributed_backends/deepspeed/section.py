"""Section `zero` of the configuration, and the field `deepspeed_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from distributed.config import NativeField, Section
from distributed_backends.deepspeed.native_config import AUTO, HALVES, NATIVE, take_native, understood

if TYPE_CHECKING:
    from distributed.config import DistributedConfig


class ZeroSection(Section):
    """Offloading of optimizer state and parameters to host memory under ZeRO."""

    native = NativeField(
        NATIVE,
        "DeepSpeed's own configuration: a mapping, a JSON file, or DeepSpeedConfig. It must not contradict"
        " the fields of this configuration.",
        read=take_native,
        wants_zero=True,
    )

    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="Offload optimizer state and step to the CPU; requires ZeRO stage 1 or higher."
    )
    offload_parameters: Literal["none", "cpu"] = Field(
        "none",
        description="Offload parameters to host memory while they are not in use; requires ZeRO stage 3.",
    )


def optimizer_place(config: DistributedConfig) -> str:
    """Where the optimizer is kept, ``none`` for the device; the field `optimizer_offload` sets it, too."""
    return "cpu" if config.optimizer_offload else ZeroSection.of(config).offload_optimizer


def native_config(config: DistributedConfig) -> dict[str, Any]:
    """The field `deepspeed_config` as DeepSpeed reads it; empty where it is not set."""
    return understood(getattr(config, NATIVE) or {}, config.mixed_precision)


def half_of(config: DistributedConfig) -> str | None:
    """``bf16`` or ``fp16`` where the DeepSpeed configuration enables it, so that it is DeepSpeed's own."""
    native = native_config(config)
    for name in HALVES:
        enabled = native.get(name, {}).get("enabled")
        if enabled is True or (enabled == AUTO and config.mixed_precision == name):
            return name
    return None
