"""What imports depended on is recorded: variables that they read or set, and files that they found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from distributed.launch.import_record import ImportRecord

MODULE = """
import os
COLOR = os.environ.get("RECORD_COLOR", "red")
COPY = {**os.environ.copy(), **dict(os.environ.items())}
SIZE = "RECORD_SIZE" in os.environ
os.environ["RECORD_RESULT"] = "made"
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportRecord]:
    """Of the import of a module that reads and sets variables."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/recorded_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    monkeypatch.setenv("RECORD_COLOR", "green")
    monkeypatch.setenv("RECORD_OTHER", "1")
    invalidate_caches()
    record = ImportRecord()
    with record.recording():
        import_module("recorded_module")
    yield record
    del sys.modules["recorded_module"]


def test_variables_that_imports_read_have_to_be_the_same(record: ImportRecord) -> None:
    env = dict(os.environ)
    assert record.difference(env, sys.path) is None
    assert record.difference({**env, "RECORD_OTHER": "2", "RECORD_NEW": "3"}, sys.path) is None
    for change in (
        {"RECORD_COLOR": "blue"},
        {"RECORD_SIZE": ""},
        {"OMP_NUM_THREADS": "77"},
        {"LD_PRELOAD": "x"},
    ):
        (name,) = change
        reason = record.difference(env | change, sys.path)
        assert reason == f"the environment variable {name} differs from when the modules were imported"
    del env["RECORD_COLOR"]
    assert "RECORD_COLOR" in (record.difference(env, sys.path) or "")


def test_variables_that_imports_set_may_be_set_already(record: ImportRecord) -> None:
    assert record.set_by_imports == {"RECORD_RESULT": "made"}
    env = {name: value for name, value in os.environ.items() if name != "RECORD_RESULT"}
    assert record.difference(env, sys.path) is None
    assert type(os.environ).__name__ == "_Environ"


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
def test_a_file_that_would_be_imported_instead_is_found(
    record: ImportRecord, tmp_path: Path, file: str, shadows: bool
) -> None:
    path = tmp_path / "new" / file
    path.parent.mkdir(parents=True)
    path.write_text("")
    import_module("ipaddress")
    top = tmp_path / "new" / file.partition("/")[0]
    expected = f"{top} would be imported instead of the imported module" if shadows else None
    assert record.difference(os.environ, [str(tmp_path / "new"), *sys.path]) == expected
    assert record.difference(os.environ, [*sys.path, str(tmp_path / "new")]) is None
    assert record.difference(os.environ, [str(tmp_path / "gone"), *sys.path]) is None


def test_a_module_whose_folder_is_not_searched_would_be_another_one(
    record: ImportRecord, tmp_path: Path
) -> None:
    path = [entry for entry in sys.path if entry != str(tmp_path / "own")]
    assert record.difference(os.environ, path) == "recorded_module would not be found in the same folder"
