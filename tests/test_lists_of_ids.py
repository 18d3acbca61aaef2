"""The list of test ids: none is gone that no map accounts for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.collected_ids import main, renamed

MOVED = {
    "tests/a": "tests/b",
    "tests/a/test_x.py": "tests/c/test_y.py",
    "tests/a/test_x.py::test_1": "tests/a/test_z.py::test_all",
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tests/a/test_x.py::test_1", "tests/a/test_z.py::test_all"),
        ("tests/a/test_x.py::test_1[a/b::c]", "tests/c/test_y.py::test_1[a/b::c]"),
        ("tests/a/test_w.py::Class::test_1", "tests/b/test_w.py::Class::test_1"),
        ("tests/ab/test_w.py::test_1", "tests/ab/test_w.py::test_1"),
    ],
)
def test_the_nearest_entry_of_the_map_counts(old: str, new: str) -> None:
    assert renamed(old, MOVED) == new


@pytest.mark.parametrize(("after", "code"), [(["n::t", "m::new"], 0), (["m::new"], 1)])
def test_an_id_that_is_gone_is_an_error(
    after: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before").write_text("o::t\n")
    (tmp_path / "after").write_text("".join(f"{test}\n" for test in after))
    (tmp_path / "map").write_text(json.dumps({"o::t": "n::t"}))
    paths = [str(tmp_path / name) for name in ("before", "after", "map")]
    assert main(["compare", *paths[:2], "--map", paths[2]]) == code
    assert ("gone: o::t" in capsys.readouterr().out) == bool(code)
