"""Hardware profiles: those that are shipped, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed import UserError
from distributed.planner.estimates import hardware
from distributed.planner.estimates.hardware import load_profile, parse_profile, shipped_profiles
from distributed.planner.estimates.measured_node import MeasuredNode

FOLDER = Path(hardware.__file__).with_name("profiles")


def values(**changed: Any) -> dict[str, Any]:
    """Those of the A100, some of them changed; None leaves a value out."""
    found = {**yaml.safe_load((FOLDER / "A100.yaml").read_text()), **changed}
    return {name: value for name, value in found.items() if value is not None}


def test_the_usual_devices_are_shipped() -> None:
    assert set(shipped_profiles()) == {"A100", "H100", "H200", "B200", "MI300X", "L40S", "CPU"}


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "B200", "MI300X", "L40S", "CPU"])
def test_a_shipped_profile_is_complete(name: str) -> None:
    profile = load_profile(name.lower())
    assert profile.name == name
    assert all(source.strip() for source in profile.sources.values())
    assert profile.link_between_nodes <= profile.link_within_node
    assert profile.flops("bf16") > 0


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values(name="mine", memory=40e9)))
    assert load_profile(path).memory == 40e9


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"memory": None, "host_link": None}, "memory", "memory, host_link"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth", "greater than 0"),
        ({"link_within_node": 0}, "link_within_node", "greater than 0"),
        ({"latency_within_node": -1e-6}, "latency_within_node", "greater than or equal to 0"),
        ({"memory": float("nan")}, "memory", ""),
        ({"memory": float("inf")}, "memory", "finite"),
        ({"memory": "eighty"}, "memory", "valid number"),
        ({"devices_per_node": 0}, "devices_per_node", "greater than or equal to 1"),
        ({"tensor_cores": 4}, "tensor_cores", "not permitted"),
        ({"peak_flops": {"bf16": -3e14}}, "peak_flops.bf16", "greater than 0"),
        ({"peak_flops": {"fp13": 3e14}}, "peak_flops.fp13", "fp32, tf32, bf16"),
        ({"sources": {}}, "sources", "memory_bandwidth"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(changed: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_profile(values(**changed), "mine.yaml")
    assert caught.value.field == field
    assert text in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_a_fraction_above_one_is_refused() -> None:
    achievable = {**values()["achievable"], "matmul": 1.2}
    with pytest.raises(UserError, match=r"achievable\.matmul"):
        parse_profile(values(achievable=achievable), "mine.yaml")


@pytest.mark.parametrize("name", ["A10O", "no/such/file.yaml"])
def test_an_unknown_profile_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UserError, match="A100, B200, CPU"):
        load_profile(name)


@pytest.mark.parametrize("text", ["- a\n- b\n", "memory: [1\n", ""])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_profile(path)


def test_a_rate_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="fp32, tf32, bf16, fp16"):
        load_profile("A100").flops("fp8")


def test_ranks_on_measured_cores_use_all_of_them() -> None:
    """A rank alone on a node has the peak of all its cores; devices are counted one by one."""
    cores = MeasuredNode.model_construct(cores=4, asynchronous=False, ranks={})
    node = load_profile("CPU").model_copy(update={"devices_per_node": 4, "measured": cores})
    each = node.flops("fp32")
    assert [node.peak_of(n, "fp32") / each for n in (1, 4, 5)] == [4, 4, 8]
    assert load_profile("A100").peak_of(3, "bf16") == 3 * load_profile("A100").flops("bf16")
