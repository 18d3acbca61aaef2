"""What imports depended on is recorded: variables that they read or set, and files that they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.starts_processes

MODULE = """
import os
COLOR = os.environ.get("RECORD_COLOR", "red")
COPY = {**os.environ.copy(), **dict(os.environ.items())}
SIZE = "RECORD_SIZE" in os.environ
os.environ["RECORD_RESULT"] = "made"
"""
RECORD = """
import ipaddress, json, os, sys
from distributed.launch.import_record import ImportRecord

sys.path.insert(0, os.path.abspath("own"))
record = ImportRecord()
with record.recording():
    import recorded_module
env = dict(os.environ)


def difference(env=env, path=sys.path):
    return record.difference(env, path)


"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/recorded_module.py").write_text(MODULE)


def recorded(folder: Path, expression: str) -> Any:
    """The value of `expression` in a new interpreter that has recorded the import of the module."""
    command = [sys.executable, "-P", "-c", f"{RECORD}print(json.dumps({expression}))"]
    env = {**os.environ, "RECORD_COLOR": "green", "RECORD_OTHER": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_variables_that_imports_read_have_to_be_the_same(tmp_path: Path) -> None:
    changes = [
        {},
        {"RECORD_OTHER": "2", "RECORD_NEW": "3"},
        {"RECORD_COLOR": "blue"},
        {"RECORD_SIZE": ""},
        {"OMP_NUM_THREADS": "77"},
        {"LD_PRELOAD": "x"},
    ]
    found = recorded(tmp_path, f"[difference(env | change) for change in {changes}]")
    reason = "the environment variable {} differs from when the modules were imported"
    names = ("RECORD_COLOR", "RECORD_SIZE", "OMP_NUM_THREADS", "LD_PRELOAD")
    assert found == [None, None, *map(reason.format, names)]
    without = "difference({name: value for name, value in env.items() if name != 'RECORD_COLOR'})"
    assert recorded(tmp_path, without) == reason.format("RECORD_COLOR")


def test_variables_that_imports_set_may_be_set_already(tmp_path: Path) -> None:
    without = "difference({name: value for name, value in env.items() if name != 'RECORD_RESULT'})"
    found = recorded(tmp_path, f"[record.set_by_imports, {without}, type(os.environ).__name__]")
    assert found == [{"RECORD_RESULT": "made"}, None, "_Environ"]


@pytest.mark.parametrize(
    ("file", "shadows"),
    [
        ("recorded_module.py", True),
        ("recorded_module/__init__.py", True),
        ("ipaddress.cpython-311-x86_64-linux-gnu.so", True),
        ("recorded_module/data.txt", False),  # no package, which gives way to the module
        ("recorded_module.txt", False),
        ("another_module.py", False),
    ],
)
def test_a_file_that_would_be_imported_instead_is_found(tmp_path: Path, file: str, shadows: bool) -> None:
    path = tmp_path / "new" / file
    path.parent.mkdir(parents=True)
    path.write_text("")
    paths = "[['new', *sys.path], [*sys.path, 'new'], ['gone', *sys.path]]"
    found = recorded(tmp_path, f"[difference(path=path) for path in {paths}]")
    top = tmp_path / "new" / file.partition("/")[0]
    expected = f"{top} would be imported instead of the imported module" if shadows else None
    assert found == [expected, None, None]


def test_a_module_whose_folder_is_not_searched_would_be_another_one(tmp_path: Path) -> None:
    found = recorded(tmp_path, "difference(path=sys.path[1:])")
    assert found == "recorded_module would not be found in the same folder"
