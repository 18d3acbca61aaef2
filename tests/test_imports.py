"""`import distributed` and ``--help`` stay light: no framework comes in before it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import distributed

pytestmark = pytest.mark.starts_processes

HEAVY = {
    "deepspeed",
    "horovod",
    "keras",
    "lightning",
    "mlflow",
    "numpy",
    "pandas",
    "ray",
    "sklearn",
    "tensorboard",
    "tensorflow",
    "torch",
}

PROGRAM = """
import json, sys
seen = {}
import distributed
seen["distributed"] = sorted(sys.modules)
import distributed.cli
distributed.cli.build_parser().format_help()
seen["help"] = sorted(sys.modules)
distributed.cli.build_parser(["train"])
seen["train"] = sorted(sys.modules)
distributed.cli.main(["backends"])
seen["backends"] = sorted(sys.modules)
print(json.dumps(seen), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, set[str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return {stage: set(names) for stage, names in json.loads(done.stderr.splitlines()[-1]).items()}


@pytest.mark.parametrize("stage", ["distributed", "help", "train", "backends"])
def test_no_framework_is_imported(seen: dict[str, set[str]], stage: str) -> None:
    assert not seen[stage] & HEAVY


def test_importing_the_package_brings_none_of_our_dependencies(seen: dict[str, set[str]]) -> None:
    assert not seen["distributed"] & {"pluggy", "pydantic", "rich", "yaml", "psutil", "cloudpickle"}


def test_help_needs_no_tables_and_no_yaml(seen: dict[str, set[str]]) -> None:
    assert not seen["help"] & {"rich", "yaml"}


def test_only_the_verb_asked_for_is_imported(seen: dict[str, set[str]]) -> None:
    assert "distributed.commands.train" not in seen["help"]
    assert "distributed.commands.doctor" not in seen["train"]


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in distributed.__all__:
        assert getattr(distributed, name) is not None
    assert set(dir(distributed)) == set(distributed.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainr"):
        distributed.Trainr  # noqa: B018
