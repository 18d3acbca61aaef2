"""Sections of plugins: part of the tree like the core's own, and never able to take the program down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import DistributedConfig, Section
from distributed.registry.catalog import build_catalog
from distributed.registry.hookspecs import hookimpl

pytestmark = pytest.mark.starts_processes

PLUGIN = """
from distributed import DistributedConfig, hookimpl

@hookimpl
def register_sections():
    return {SECTIONS}
"""
SECTION = """
from pydantic import Field
from distributed import Section
from distributed.config import NativeField


def read(values):
    native = values.get("acme_native")
    if native is None:
        return dict(values), {}
    return {"epochs": native["passes"], **values}, {"epochs": "acme_native"}


class AcmeSection(Section):
    '''How acme works.'''

    native = NativeField("acme_native", "Acme's own configuration.", read)
    chunks: int = Field(1, ge=1, description="Messages.", json_schema_extra={"flag": "--acme-chunks"})
    epochs: int = Field(1, description="Taken.", json_schema_extra={"flag": "--epochs"})


class Needs(Section):
    value: int


class Other(Section):
    value: int = Field(1)


NOT_ONE = 3
"""
POINTS = "[distributed.plugins]\nacme = acme_plugin\n"


@pytest.fixture
def acme(make_distribution: Callable[..., Path]) -> Callable[..., str]:
    """Runs a program in a process where plugin `acme` registers the given sections."""

    def run(sections: dict[str, str], *words: str) -> str:
        modules = {"acme_plugin": PLUGIN.replace("{SECTIONS}", repr(sections)), "acme_section": SECTION}
        site = make_distribution("acme-plugins", modules, POINTS)
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return run


GOOD = {"acme": "acme_section:AcmeSection"}
PROGRAM = """
import pickle, sys
import cloudpickle
from acme_plugin import DistributedConfig as seen_by_the_plugin
from distributed import DistributedConfig, UserError
from distributed.config import explain, load

assert seen_by_the_plugin is DistributedConfig
config = load(overrides={"acme.chunks": 3, "acme_native": {"passes": 7}})
assert isinstance(config, DistributedConfig)
assert (config.acme.chunks, config.epochs) == (3, 7)
assert config.origin("acme.chunks") == "argument" and config.origin("epochs") == "acme_native"
for library in (pickle, cloudpickle):
    again = library.loads(library.dumps(config))
    assert again == config and again.origin("epochs") == "acme_native"
assert ("acme.chunks", 3, "argument") in explain(config)
for values in ({"acme": {"chunk": 1}}, {"acme.chunks": 0}):
    try:
        load(overrides=values)
    except UserError as error:
        print(error)
open("config.pickle", "wb").write(pickle.dumps(config))
assert not set(sys.modules) & {"torch", "tensorflow", "ray", "deepspeed", "horovod"}
"""


def test_a_section_is_part_of_the_tree(
    acme: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = acme(GOOD, "-c", PROGRAM)
    assert "unknown configuration field 'acme.chunk'. Did you mean 'acme.chunks'?" in out
    assert "Field: acme.chunks" in out or "acme.chunks" in out.splitlines()[-1]


def test_a_rank_unpickles_it_before_anything_else(
    acme: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    both = f"{PROGRAM}\nimport subprocess\nsubprocess.run([sys.executable, '-c', {READ!r}], check=True)"
    assert "read 3 7 acme_native" in acme(GOOD, "-c", both)


READ = """
import pickle
config = pickle.load(open("config.pickle", "rb"))
print("read", config.acme.chunks, config.epochs, config.origin("epochs"))
"""


def test_a_flag_is_declared_by_the_field_and_a_taken_one_is_left_out(acme: Callable[..., str]) -> None:
    words = ["-m", "distributed.cli", "config", "show", "--acme-chunks", "4", "--epochs", "2"]
    out = acme(GOOD, *words)
    assert "\nepochs: 2\n" in out
    assert "\nacme:\n  chunks: 4\n" in out


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"data": "acme_section:Other"}, "ValueError: the configuration already has a field 'data'"),
        ({"epochs": "acme_section:Other"}, "ValueError: the configuration already has a field 'epochs'"),
        ({"origin": "acme_section:Other"}, "ValueError: the configuration already has a field 'origin'"),
        ({"a b": "acme_section:Other"}, "ValueError: 'a b' cannot be the name of a configuration field"),
        ({"acme": "acme_nowhere:Other"}, "ModuleNotFoundError: No module named 'acme_nowhere'"),
        ({"acme": "acme_section:NOT_ONE"}, "is not a subclass of distributed.Section"),
        ({"acme": "acme_section:Needs"}, "ValidationError: 1 validation error for Needs"),
    ],
)
def test_a_broken_section_is_reported_and_the_program_runs(
    acme: Callable[..., str], sections: dict[str, str], error: str
) -> None:
    (broken,) = json.loads(acme(sections, "-m", "distributed.cli", "backends", "--json"))["broken"]
    assert broken["name"] == "acme"
    assert error in broken["error"]


class Offers:
    """A plugin with one section."""

    @hookimpl
    def register_sections(self) -> dict[str, str]:
        return {"twice": f"{__name__}:Twice"}


class Twice(Section):
    """Registered by two plugins."""


class Wrong:
    """A plugin whose hook returns something else."""

    @hookimpl
    def register_sections(self) -> Any:
        return ["ring"]


def test_a_name_belongs_to_the_first_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Offers.__module__])
    catalog = build_catalog([Offers(), Offers()], found=[])
    assert catalog.sections == {"twice": Twice}
    assert [b.error for b in catalog.broken] == ["ValueError: the configuration already has a field 'twice'"]


def test_an_answer_that_is_no_mapping_is_reported() -> None:
    (broken,) = build_catalog([Wrong()], found=[]).broken
    assert broken.error.startswith("ValueError: ")


def test_a_section_is_found_by_its_class() -> None:
    with pytest.raises(LookupError, match="no section Twice"):
        Twice.of(DistributedConfig())
