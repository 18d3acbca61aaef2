"""Runs under other versions: what is installed, what is run again, and the line that they leave."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.campaigns import versions
from tests.campaigns.versions import OLDEST, Part, State, constraints, lower_bounds, record, run_parts

CONSTRAINTS = versions.PINS
OTHER_SOURCE = {"cmake": "docs/decisions/horovod.md"}
"""Bounds that another page accounts for."""

PAGE = "# Times\n\n## Campaigns\n\nother lines\n\n## Long runs\n\n- `kills`, commit `c`, then: none.\n"


@pytest.mark.parametrize("name", sorted(lower_bounds()))
def test_lower_bounds_are_releases_that_the_tests_ran_with(name: str) -> None:
    """Those of the pins, or those that `make long versions` installs."""
    pinned = dict(line.lower().split("==") for line in CONSTRAINTS.read_text().split())
    of_a_pin = f"{pinned[name]}.".startswith(f"{lower_bounds()[name]}.")
    assert of_a_pin or name in (*OLDEST, "torch", *OTHER_SOURCE)


def test_the_oldest_releases_take_the_place_of_pins() -> None:
    kept = ["pydantic==2.14.3", "PyYAML==6.0.3", "pytest==9.2.0"]
    pins = "\n".join([*kept, "pydantic_core==2.50.4", "setuptools==84.2.1", "torch==2.13.0"])
    low = lower_bounds()["pydantic"]
    expected = [f"pydantic=={low}.*", "PyYAML==6.0.*", "pytest==9.2.0"]
    assert constraints("2.11.0", OLDEST, pins).split("\n") == ["torch==2.11.0", *expected, ""]
    assert constraints("2.11.0", (), pins).split("\n") == ["torch==2.11.0", *kept, ""]


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    """One that passes and one that passes when a file is there; each adds a line to its own file."""

    def script(name: str, then: str) -> Part:
        note = f"open({str(tmp_path / name)!r}, 'a').write('x')"
        return Part(name, (sys.executable, "-c", f"import os, sys; {note}; {then}"))

    repaired = f"sys.exit(0 if os.path.exists({str(tmp_path / 'repaired')!r}) else 'out of luck')"
    return [script("first", "print('3 passed')"), script("second", repaired)]


@pytest.mark.starts_processes
def test_what_has_passed_is_not_run_again_on_the_same_commit(parts: list[Part], tmp_path: Path) -> None:
    def go(commit: str, pins: str = "pins") -> dict[str, str]:
        state = State(tmp_path / "state" / "state.json", pins, commit)
        state.installed = True
        return run_parts(parts, state, os.environ)

    assert go("a") == {"first": "3 passed", "second": "failed (exit code 1): out of luck"}
    (tmp_path / "repaired").touch()
    assert list(go("a").values()) == ["3 passed", ""]
    go("a")
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["x", "xx"]
    go("b")
    go("b", "other pins")
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["xxx", "xxxx"]


def test_a_line_is_added_to_its_section_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE + "\n## Other\n\ntext\n")
    for result in ("1 passed", "2 passed"):
        record("`versions --torch 2.11.0`", result, "abc", page)
    record("`versions --torch 2.11.0`", "3 passed", "def", page)
    text = page.read_text()
    assert re.findall(r"commit `(\w+)`, [-\d]+: (.*)\.", text) == [("abc", "2 passed"), ("def", "3 passed")]
    assert text.startswith(PAGE)
    assert text.endswith("\n\n## Other\n\ntext\n")


def test_a_page_without_the_section_gets_it(tmp_path: Path) -> None:
    record("`versions`", "1 passed", "abc", tmp_path / "page.md")
    assert re.search(
        r"^# .+\n\n.+\n\n## Long runs\n\n- .*: 1 passed\.\n$", (tmp_path / "page.md").read_text()
    )
