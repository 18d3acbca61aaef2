"""The table of names in docs/coming-from-names.md. ``python -m tests.seeds.table`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.seeds import basics, dilated, scaling, sketched, trainers
from tests.seeds.row import Row

__all__ = ["GUIDES", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-names.md"
BEGIN, END = "<!-- made by python -m tests.seeds.table -->\n", "<!-- end of the table -->\n"

GUIDES = {
    "Sketched layers (Panther)": sketched.ROWS,
    "Data parallelism by hand": basics.ROWS,
    "Dilated attention": dilated.ROWS,
    "Sharding and scaling": scaling.ROWS,
    "A training platform": trainers.ROWS,
}
"""Subject of a guide -> its names, in its order."""


def table() -> str:
    """The table of each guide under a heading."""
    return "\n".join(_section(subject, rows) for subject, rows in GUIDES.items())


def _section(subject: str, rows: list[Row]) -> str:
    lines = [f"### {subject}", "", "| name, and the call there | here | difference |", "|---|---|---|"]
    return "\n".join([*lines, *(_line(row) for row in rows), ""])


def _line(row: Row) -> str:
    here = "as it is" if row.works else _code(row.here)
    return f"| **{row.name}**<br>{_code(row.there)} | {here} | {row.remark or 'none'} |"


def _code(text: str) -> str:
    parts = [part.strip() for part in text.strip().split("\n")]
    return "<br>".join(f"`{part}`".replace("|", "\\|") for part in parts)


def write() -> None:
    """Put the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
