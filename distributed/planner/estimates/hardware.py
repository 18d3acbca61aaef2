"""HardwareProfile: rates, memory and links of one kind of device and of the nodes that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed.errors import UserError, did_you_mean
from distributed.planner.estimates.measured_node import MeasuredNode

__all__ = ["Achievable", "HardwareProfile", "load_profile", "parse_profile", "shipped_profiles"]

_FOLDER = Path(__file__).with_name("profiles")
_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_UNSOURCED = {"name", "summary", "device", "sources", "achievable", "measured"}

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Achievable(_Section):
    """What software reaches of the rates of a datasheet: the fitted parameters of the time model.

    Attributes:
        matmul: share of the peak of matrix products that large ones reach.
        memory: share of the memory bandwidth.
        link_within_node: share of the bandwidth of links within a node.
        link_between_nodes: share of the bandwidth of links between nodes.
        activation_passes: how often elementwise operations move the activations of a block through memory in
            one pass, in units of the bytes that the block stores for backward.
        block_seconds: seconds that the host needs to launch the forward pass of a block.
        spread: relative half-width of the interval that holds 80 % of measured step times.
    """

    matmul: Fraction
    memory: Fraction
    link_within_node: Fraction
    link_between_nodes: Fraction
    activation_passes: Positive
    block_seconds: Seconds
    spread: Seconds


class HardwareProfile(_Section):
    """One kind of device in nodes of equal size.

    Attributes:
        name: the profile's name.
        summary: the device and its node, in one line.
        device: ``cuda``, or ``cpu`` for ranks that are processes on CPU cores.
        peak_flops: dtype -> dense floating-point operations per second of matrix products.
        memory: bytes of a device.
        memory_bandwidth: bytes per second.
        devices_per_node: devices that the links within a node connect.
        link_within_node: bytes per second that a device sends to others of its node.
        link_between_nodes: bytes per second that a device sends to other nodes, by its share of the network
            adapters of the node.
        latency_within_node: seconds of a message apart from its bytes.
        latency_between_nodes: the same between nodes.
        host_memory: bytes of host memory for each device.
        host_link: bytes per second between a device and host memory.
        achievable: what software reaches.
        measured: times of operations and collectives on one node, which `calibrate` measures; None where
            there are only rates.
        sources: name of a value -> where it was published or measured.
    """

    name: str
    summary: str
    device: Literal["cuda", "cpu"] = "cuda"
    peak_flops: Mapping[str, Positive]
    memory: Positive
    memory_bandwidth: Positive
    devices_per_node: int = Field(ge=1)
    link_within_node: Positive
    link_between_nodes: Positive
    latency_within_node: Seconds
    latency_between_nodes: Seconds
    host_memory: Positive
    host_link: Positive
    achievable: Achievable
    measured: MeasuredNode | None = None
    sources: Mapping[str, str]

    def peak_of(self, num_ranks: int, precision: str) -> float:
        """Dense operations per second of all devices that `num_ranks` ranks use. Ranks on the cores of a node
        use all of them, however few they are.

        Raises:
            UserError: as `flops`.
        """
        per_node = self.devices_per_node if self.measured is not None and self.device == "cpu" else 1
        return self.flops(precision) * -(-num_ranks // per_node) * per_node

    @property
    def devices_of_host(self) -> int | None:
        """Devices of a host; None for processes, of which a host has as many as are started."""
        return None if self.device == "cpu" else self.devices_per_node

    def flops(self, precision: str) -> float:
        """Dense operations per second of matrix products in `precision`.

        Raises:
            UserError: the profile has no rate for it.
        """
        if precision not in self.peak_flops:
            raise UserError(
                f"the hardware profile {self.name} has no rate for this precision",
                field="precision",
                got=precision,
                allowed=", ".join(self.peak_flops),
                remedy="Choose one of these, or add the rate to peak_flops of the profile",
            )
        return self.peak_flops[precision]


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_profile(name: str | Path) -> HardwareProfile:
    """The profile that is shipped under `name`, in any case, or that of a YAML file.

    Raises:
        UserError: there is no such profile, or a value of the file is missing or out of range.
    """
    shipped = {stem.lower(): _FOLDER / f"{stem}.yaml" for stem in shipped_profiles()}
    path = shipped.get(str(name).lower(), Path(name))
    if not path.is_file() and (path.suffix or len(path.parts) > 1):
        raise UserError(
            "there is no such file",
            field="hardware",
            got=str(name),
            allowed=f"the path of a YAML file, or {', '.join(shipped_profiles())}",
            remedy="Write one with the command `calibrate`, or choose a profile that is shipped",
        )
    if not path.is_file():
        raise UserError(
            f"no hardware profile has this name.{did_you_mean(str(name).upper(), shipped_profiles())}",
            field="hardware",
            got=str(name),
            allowed=f"{', '.join(shipped_profiles())}, or the path of a YAML file",
            remedy="Choose one of these, or copy the nearest to a file and change its values",
        )
    return parse_profile(_read(path), str(path))


def _read(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"the hardware profile cannot be read: {error}",
            field="hardware",
            got=str(path),
            remedy="Write it as YAML, like the shipped profiles",
        ) from None


def parse_profile(values: Any, path: str) -> HardwareProfile:
    """The profile with `values`, which were read from `path`.

    Raises:
        UserError: a value is missing, unknown, out of range or without a source.
    """
    try:
        profile = HardwareProfile.model_validate(values)
    except ValidationError as error:
        raise _describe(error, path) from None
    unknown = sorted(set(profile.peak_flops) - set(_DTYPES))
    if unknown:
        raise UserError(
            f"unknown dtype in the hardware profile {path}",
            field=f"peak_flops.{unknown[0]}",
            got=unknown[0],
            allowed=", ".join(_DTYPES),
            remedy="Rename it, or leave it out",
        )
    missing = sorted(set(HardwareProfile.model_fields) - _UNSOURCED - set(profile.sources))
    if missing:
        raise UserError(
            f"values of the hardware profile {path} have no source",
            field="sources",
            got=", ".join(missing),
            allowed="a line for each value",
            remedy="Name the datasheet, or the command that measured them",
        )
    return profile


def _describe(error: ValidationError, path: str) -> UserError:
    missing = [_dotted(e["loc"]) for e in error.errors() if e["type"] == "missing"]
    if missing:
        return UserError(
            f"the hardware profile {path} lacks values",
            field=missing[0],
            got=", ".join(missing),
            allowed="every value of a profile",
            remedy="Measure it again with `calibrate`"
            if missing[0].startswith("measured.")
            else "Add them; a shipped profile has them with their units and sources",
        )
    first = error.errors()[0]
    return UserError(
        f"a value of the hardware profile {path} cannot be used: {first['msg']}",
        field=_dotted(first["loc"]) or "hardware",
        got=first.get("input") if not isinstance(first.get("input"), dict) else None,
        remedy="Correct it; bytes, seconds and operations per second are positive numbers",
    )


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))
