"""Plugins: a broken one is isolated and named, a name belongs to one owner, hooks are documented."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.backend_spec import BackendSpec, Capabilities
from distributed.interfaces.callback import Callback
from distributed.interfaces.codec import CodecSpec
from distributed.interfaces.tracker import TrackerSpec
from distributed.registry import hookspecs
from distributed.registry.catalog import GROUPS, build_catalog, missing_modules, require
from distributed.registry.hookspecs import hookimpl

TESTS = Path(__file__).parent.parent
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")]

GOOD = """
from distributed.registry.hookspecs import hookimpl
from distributed.interfaces.backend_spec import BackendSpec

@hookimpl
def register_backends():
    return [BackendSpec(name="acme", target="acme_backend:Backend")]
"""
RAISES_WHEN_IMPORTED = "import a_module_that_nobody_has"
RAISES_WHEN_CALLED = """
from distributed.registry.hookspecs import hookimpl

@hookimpl
def register_backends():
    raise ZeroDivisionError("no backends today")
"""
ENTRY_POINTS = """
[distributed.backends]
acme = acme_backend
acme-import = acme_import
acme-call = acme_call
acme-absent = acme_absent
"""


class Offers:
    """A plugin object with one backend."""

    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def register_backends(self) -> list[BackendSpec]:
        return [BackendSpec(name=name, target=f"module_of_{id(self)}:Backend") for name in self.names]


@pytest.fixture
def acme(make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {
        "acme_backend": GOOD,
        "acme_import": RAISES_WHEN_IMPORTED,
        "acme_call": RAISES_WHEN_CALLED,
    }
    site = make_distribution("acme-plugins", modules, ENTRY_POINTS)
    monkeypatch.syspath_prepend(site)
    return site


def test_a_broken_plugin_is_reported_and_the_others_load(acme: Path) -> None:
    catalog = build_catalog()
    assert catalog.backends["acme"].target == "acme_backend:Backend"
    broken = {plugin.name: plugin for plugin in catalog.broken}
    assert "No module named 'a_module_that_nobody_has'" in broken["acme-import"].error
    assert broken["acme-import"].origin == "acme-plugins 1.2 (acme_import)"
    assert "acme_import.py" in broken["acme-import"].details
    assert broken["acme-call"].error == "ZeroDivisionError: no backends today"
    assert "No module named 'acme_absent'" in broken["acme-absent"].error


def test_a_distribution_found_twice_counts_once(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = [(plugin.name, plugin.error) for plugin in build_catalog().broken]
    twice = [*entry_points(group="distributed.backends"), *entry_points(group="distributed.backends")]
    found = build_catalog(found=twice)
    assert "acme" in found.backends
    assert [(plugin.name, plugin.error) for plugin in found.broken] == [
        pair for pair in once if pair[0] in {plugin.name for plugin in found.broken}
    ]
    assert not any("already registered" in plugin.error for plugin in found.broken)


def test_an_unknown_backend_names_the_nearest_and_the_broken_plugin_that_may_be_meant(acme: Path) -> None:
    points = [p for p in entry_points(group="distributed.backends") if p.value.startswith("acme")]
    with pytest.raises(UserError) as caught:
        build_catalog(found=points).backend("acne")
    assert "Did you mean 'acme'?" in str(caught.value)
    assert "'acme-import' could not be loaded" in str(caught.value)


def test_a_name_belongs_to_the_first_and_the_second_is_reported() -> None:
    first, second = Offers("twice"), Offers("twice", "other")
    catalog = build_catalog([first, second], found=[])
    assert set(catalog.backends) == {"twice", "other"}
    assert [plugin.error for plugin in catalog.broken] == [
        f"backend 'twice' is already registered by {catalog.origins['twice']}"
    ]


def test_a_missing_requirement_is_a_user_error_with_the_command() -> None:
    spec = BackendSpec(
        name="far", target="far:Backend", requires=("far_away.part",), install_hint="pip install far-away"
    )
    with pytest.raises(UserError, match=r"far_away\.part.*pip install far-away"):
        build_catalog(found=[]).load_backend(spec)


def test_missing_modules_imports_nothing() -> None:
    name = "this"  # the standard library's poem prints when imported
    sys.modules.pop(name, None)
    assert missing_modules([name, "nobody_has_this", "nobody_has_this.part"]) == [
        "nobody_has_this",
        "nobody_has_this.part",
    ]
    assert name not in sys.modules
    require([name], "poem", "")


def test_trackers_keep_their_order() -> None:
    class Plugin:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def register_trackers(self) -> list[TrackerSpec]:
            return [TrackerSpec(name=self.name, target="m:C", enabled=lambda config: True)]

    trackers = build_catalog([Plugin("b"), Plugin("a")], found=[]).trackers
    assert [spec.name for spec in trackers] == ["b", "a"]


class EveryHook:
    """Implements each hook with the arguments that its specification names."""

    def __init__(self) -> None:
        self.called: list[str] = []

    @hookimpl
    def register_backends(self) -> list[BackendSpec]:
        self.called.append("register_backends")
        return []

    @hookimpl
    def register_sections(self) -> dict[str, str]:
        self.called.append("register_sections")
        return {}

    @hookimpl
    def register_codecs(self) -> list[CodecSpec]:
        self.called.append("register_codecs")
        return []

    @hookimpl
    def register_trackers(self) -> list[TrackerSpec]:
        self.called.append("register_trackers")
        return []

    @hookimpl
    def register_callbacks(self, config: DistributedConfig) -> list[Any]:
        self.called.append("register_callbacks")
        return []

    @hookimpl
    def register_commands(self, subparsers: Any) -> None:
        self.called.append("register_commands")

    @hookimpl
    def check_plan(self, plan: Any) -> None:
        self.called.append("check_plan")

    @hookimpl
    def on_run_start(self, plan: Any) -> None:
        self.called.append("on_run_start")

    @hookimpl
    def on_restart(self, plan: Any, error: Any) -> None:
        self.called.append("on_restart")

    @hookimpl
    def on_run_end(self, plan: Any, history: Any, error: Any) -> None:
        self.called.append("on_run_end")


def test_every_hook_can_be_implemented_by_its_documented_arguments() -> None:
    plugin = EveryHook()
    catalog = build_catalog([plugin], found=[])
    catalog.add_commands(None)
    for name in ("register_callbacks", "check_plan", "on_run_start", "on_restart", "on_run_end"):
        arguments = inspect.signature(getattr(hookspecs, name)).parameters
        getattr(catalog.manager.hook, name)(**dict.fromkeys(arguments))
    assert sorted(plugin.called) == sorted(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_and_implemented_in_some_test(hook: str) -> None:
    assert len(inspect.getdoc(getattr(hookspecs, hook)) or "") > 30
    sources = (path.read_text() for path in TESTS.rglob("*.py"))
    assert any(f"def {hook}(" in source for source in sources)


TAKES_A_NAME = """
from distributed.registry.hookspecs import hookimpl
from distributed.interfaces.backend_spec import BackendSpec

@hookimpl
def register_backends():
    return [BackendSpec(name="serial", target="acme_thief:Backend")]
"""


def test_nobody_takes_a_built_in_backends_name(
    make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is found first."""
    points = "[distributed.backends]\nthief = acme_thief\n"
    site = make_distribution("acme-thief", {"acme_thief": TAKES_A_NAME}, points)
    monkeypatch.syspath_prepend(site)
    catalog = build_catalog()
    assert catalog.backends["serial"].target == "distributed.training.torch_backend:TorchBackend"
    (thief,) = [plugin for plugin in catalog.broken if plugin.name == "thief"]
    assert thief.origin == "acme-thief 1.2 (acme_thief)"
    assert thief.error.startswith("backend 'serial' is already registered by distributed-trainer ")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_in_the_guide(hook: str) -> None:
    """With its arguments as they are."""
    page = (TESTS.parent / "docs" / "plugins.md").read_text(encoding="utf-8")
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"| `{hook}({arguments})` |" in page
    assert f"def {hook}(" in page


def test_every_capability_and_entry_point_group_is_in_the_guide() -> None:
    page = (TESTS.parent / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(Capabilities) if f"| `{field.name}` |" not in page] == []
    assert [group for group in GROUPS if f"| `{group}` |" not in page] == []


def test_every_call_of_a_backends_life_is_in_the_guide() -> None:
    page = (TESTS.parent / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert [name for name in Backend.__abstractmethods__ if f"`{name}" not in page] == []
    events = [name for name in vars(Callback) if name.startswith("on_")]
    assert [name for name in events if f"`{name}`" not in page] == []
