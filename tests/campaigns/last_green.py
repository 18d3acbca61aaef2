"""Line of the last green campaigns in docs/test-times.md: `make campaigns` writes it, .ci/run reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGE", "GroupResult", "LastGreen", "read_last_green", "write_last_green"]

PAGE = Path(__file__).parents[2] / "docs" / "test-times.md"
_BEGIN = "Last green campaigns: commit "
_LINE = re.compile(rf"{_BEGIN}`(?P<commit>[0-9a-f]{{40}})`, (?P<date>\d{{4}}-\d\d-\d\d); (?P<groups>.+)\.")
_GROUP = re.compile(r"([a-z0-9-]+) (\d+) tests in (\d+) s")


@dataclass(frozen=True)
class GroupResult:
    """Number of tests of a group that passed, and their seconds in one process."""

    tests: int
    seconds: float


@dataclass(frozen=True)
class LastGreen:
    """A run in which every group passed.

    Attributes:
        commit: full hash of the commit that was tested.
        date: day of the run, as ``2026-11-26``.
        groups: group name -> result.
    """

    commit: str
    date: str
    groups: Mapping[str, GroupResult]

    def __str__(self) -> str:
        groups = ", ".join(f"{name} {g.tests} tests in {g.seconds:.0f} s" for name, g in self.groups.items())
        return f"{_BEGIN}`{self.commit}`, {self.date}; {groups}."


def read_last_green(page: str) -> LastGreen | None:
    """The line in the text of the page; None if it has none.

    Raises:
        ValueError: there is a line, and it has another form.
    """
    lines = [line for line in page.splitlines() if line.startswith(_BEGIN)]
    if not lines:
        return None
    found = _LINE.fullmatch(lines[0]) if len(lines) == 1 else None
    groups = (
        {name: GroupResult(int(n), float(s)) for name, n, s in _GROUP.findall(found["groups"])}
        if found
        else {}
    )
    last = found and LastGreen(found["commit"], found["date"], groups)
    if last is None or str(last) != lines[0]:
        raise ValueError(f"docs/test-times.md: not a line that `make campaigns` writes: {lines[0]}")
    return last


def write_last_green(last: LastGreen, path: Path = PAGE) -> None:
    """Replace the line of the page, or add it at the end of the section ``## Campaigns``."""
    page = path.read_text(encoding="utf-8")
    kept = "\n".join(line for line in page.splitlines() if not line.startswith(_BEGIN))
    head, _, rest = kept.partition("## Campaigns\n")
    path.write_text(
        f"{head.rstrip()}\n\n## Campaigns\n\n{last}\n\n{rest.strip()}".rstrip() + "\n", encoding="utf-8"
    )
