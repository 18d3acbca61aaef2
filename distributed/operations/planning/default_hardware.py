"""The hardware profile of this machine, where none is named."""

from __future__ import annotations

import re
from pathlib import Path

from distributed.errors import UserError
from distributed.planner.estimates.hardware import HardwareProfile, load_profile, shipped_profiles
from distributed.system.devices import visible_gpus

__all__ = ["MEASURED", "profile_of"]

MEASURED = "hardware.yaml"
"""File into which `calibrate` writes, and from which plans are made where it exists."""


def profile_of(name: str | Path | HardwareProfile | None) -> tuple[HardwareProfile, str]:
    """The profile called `name`, and where it is from: by default `MEASURED` in the working directory, then
    the shipped profile of this machine's GPU, then that of a CPU.

    Raises:
        UserError: there is no such profile, or a value of it is missing or out of range.
    """
    if isinstance(name, HardwareProfile):
        return name, "as given"
    if name is not None:
        return load_profile(name), str(name)
    if Path(MEASURED).is_file():
        return load_profile(MEASURED), MEASURED
    name = _gpu_name()
    for shipped in shipped_profiles():
        if re.search(rf"\b{shipped}\b", name, re.IGNORECASE):
            return _with_memory(load_profile(shipped)), f"the shipped profile of {name}"
    if name:
        raise UserError(
            "there is no shipped profile of this machine's GPU",
            field="hardware",
            got=name,
            allowed=f"{', '.join(shipped_profiles())}, or the path of a YAML file",
            remedy="Name the nearest of these, or run `calibrate` first",
        )
    return load_profile("CPU"), "the shipped profile, whose rates are assumptions: run `calibrate` first"


def _with_memory(profile: HardwareProfile) -> HardwareProfile:
    """`profile` with the memory of the device that is here, if that is less."""
    import torch

    total = float(torch.cuda.get_device_properties(0).total_memory)
    return profile.model_copy(update={"memory": min(profile.memory, total)})


def _gpu_name() -> str:
    if not visible_gpus():
        return ""
    import torch

    return torch.cuda.get_device_name(0)
