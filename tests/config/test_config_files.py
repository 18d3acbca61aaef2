"""Configuration files that are no configuration: each is refused in one sentence, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.config.load import parse_assignments, read_file
from distributed.errors import UserError

LEVELS = 60
BOMB = "tune:\n  a0: &a0 [1, 1]\n" + "".join(
    f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, LEVELS)
)
MERGED = "tune:\n  a0: &a0 {x: 1}\n" + "".join(
    f"  a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: 1}}\n" for n in range(1, LEVELS)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "the aliases of the configuration file stand for too many values"),
        (MERGED, "the aliases of the configuration file stand for too many values"),
        ("tune: &t\n  again: *t\n", "not valid YAML: an alias is part of what it stands for"),
        ("tune: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("seed: 2024-13-45\n", "not valid YAML: month must be in 1..12"),
        ("seed: [1\n", "not valid YAML: while parsing a flow sequence"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        ("# " + "x" * (1 << 20), "too large"),
        ("- 1\n", "must hold names and values at its top level"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"^config: .*{message}") as caught:
        read_file(path)
    assert "run.yaml" in str(caught.value) or "top level" in message


def test_many_values_behind_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tune:\n  a: &a [1, 2]\n  b: [" + "*a, " * 1000 + "]\n")
    assert read_file(tmp_path / "run.yaml").values["tune"]["b"] == [[1, 2]] * 1000


def test_an_assigned_date_that_does_not_exist_is_text() -> None:
    assert parse_assignments(["tracking.run_name=2024-13-45"]) == {"tracking.run_name": "2024-13-45"}
