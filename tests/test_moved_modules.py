"""Old module paths are found for one release, with a warning that names the new import."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

import distributed
from distributed._moved import MODULES, NAMES, RENAMED

# What a third party's backend imports that was written before modules moved.
BACKEND = """
from distributed.hookspecs import hookimpl
from distributed.interfaces.backend import BackendSpec, Capabilities, StepResult, World
from distributed.plugin_manager import build_catalog
from distributed.process_group import ProcessGroupBackend
from distributed.torch_backend import StepModule, TorchBackend, alike

@hookimpl
def register_backends():
    return [BackendSpec(name="old", target="old:Old", capabilities=Capabilities())]

class Old(ProcessGroupBackend):
    pass
"""


def run(source: str) -> tuple[dict[str, Any], list[str]]:
    names: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(source, names)
    assert {warning.category for warning in caught} <= {DeprecationWarning}
    assert {warning.filename for warning in caught} <= {"<string>"}, "it points at the line to change"
    return names, [str(warning.message) for warning in caught]


def test_a_backend_with_old_imports_gets_the_same_objects() -> None:
    names, messages = run(BACKEND)
    for name in ("BackendSpec", "Capabilities", "ProcessGroupBackend", "StepModule", "TorchBackend"):
        assert names[name] is getattr(distributed, name)
        assert any(f"use `from distributed import {name}`" in message for message in messages)
    assert names["World"] is distributed.World
    assert names["hookimpl"] is distributed.hookimpl
    build = import_module("distributed.registry.catalog").build_catalog
    assert names["build_catalog"] is build
    assert any("`from distributed.registry.catalog import build_catalog`" in text for text in messages)
    assert "distributed.interfaces.backend.StepResult" not in " ".join(messages), "it has not moved"
    assert names["register_backends"]()[0].name == "old"


def test_packages_that_were_modules() -> None:
    names, messages = run(
        "from distributed.launch import LocalLauncher, rank_envs\n"
        "from distributed.testing.parity import Side, parse_side\n"
        "from distributed.bundled.digits import load_digits\n"
        "import distributed.plan as plan\n"
        "RunPlan = plan.RunPlan\n"
    )
    assert names["RunPlan"].__module__ == "distributed.interfaces.plan"
    assert names["LocalLauncher"].__module__ == "distributed.launch.local_launcher"
    assert len(set(messages)) == 6


def test_an_old_module_does_not_take_the_place_of_a_function() -> None:
    """`import distributed.plan` sets the attribute `plan` of the package, which is a public function."""
    import_module("distributed.plan")
    assert {name for name in distributed.__all__ if f"distributed.{name}" in MODULES} == {"plan"}
    assert distributed.plan({"parameters": 1e9, "global_batch": 8}, hardware="H100", num_devices=8).rows


@pytest.mark.parametrize("old", MODULES)
def test_every_new_place_is_there(old: str) -> None:
    assert find_spec(MODULES[old]) is not None
    assert find_spec(old) is not None


@pytest.mark.parametrize("old", sorted(NAMES))
def test_every_carried_name_is_there(old: str) -> None:
    for name, home in NAMES[old].items():
        assert hasattr(import_module(home), RENAMED.get(home, {}).get(name, name))


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(ImportError, match="nothing"):
        exec("from distributed.plan import nothing")
    with pytest.raises(ModuleNotFoundError):
        import_module("distributed.nothing")


@pytest.mark.starts_processes
def test_plugins_by_their_old_paths_in_a_fresh_process() -> None:
    source = (
        "import sys\n"
        "from distributed_plugins.monitor import PerformanceMonitor\n"
        "assert PerformanceMonitor.__module__ == 'distributed_plugins.manual_monitors'\n"
        "assert 'torch' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-W", "always", "-c", source], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "DeprecationWarning: distributed_plugins.monitor.PerformanceMonitor has moved" in found.stderr
