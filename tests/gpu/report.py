"""The results as a table on the terminal and as the page ``docs/benchmarks-gpu.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.gpu.catalog import CHECKS
from tests.gpu.checks import rows_of

__all__ = ["page", "table"]

_HEAD = ("row", "status", "value", "limit", "unit", "seconds", "detail")

_INTRODUCTION = """# Benchmarks on GPUs

Correctness and cost on CUDA, from one program. Each check runs in a process of its own with a time limit,
compares with an oracle on the CPU in float64 or with torch's own function, and reports one row or several.
Times are reported and never pass or fail a row. [Benchmarks](benchmarks.md) on CPUs are another page.

```bash
make test-gpu
python -m tests.gpu --markdown
```

The second needs no installation, only torch and what `tests/gpu/README.md` lists, and rewrites this page.
Rows that say `earlier run` were measured at an earlier commit, on a card of the same kind and under the same
torch. What the times mean is in [Benchmarks](benchmarks.md#attention-on-a-gpu).
"""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Aligned columns, a line for each row, and a line of totals."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD) - 1)]
    text = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*text, "", totals(rows)])


def totals(rows: Sequence[dict[str, Any]]) -> str:
    """How many rows there are of each status."""
    count = Counter(row["status"] for row in rows)
    return ", ".join(f"{number} {status}" for status, number in sorted(count.items())) or "no rows"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    detail = row["detail"]
    if row["status"] == "error":
        detail = f"{detail} ({row['log']})"
    return (
        row["name"],
        row["status"],
        _number(row["value"]),
        _number(row["limit"]),
        row["unit"],
        f"{row['seconds']:.1f}",
        detail,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def page(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The page: the last run's results, and what each row means."""
    return "\n".join([_INTRODUCTION, "## Results\n", *_results(rows, facts), "## Rows\n", *_meanings()])


def _results(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    if not rows or not facts.get("gpus"):
        return ["No run on a GPU has been recorded yet.\n"]
    names = Counter(facts["gpus"])
    gpus = ", ".join(f"{number} x {name}" for name, number in names.items())
    versions = {"torch": "torch", "CUDA": "cuda", "NCCL": "nccl", "Python": "python"}
    where = f"{gpus}; {', '.join(f'{name} {facts[key]}' for name, key in versions.items())}."
    head = ["| row | status | value | limit | unit | seconds | detail |", "|---|---|---|---|---|---|---|"]
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in _cells(row)) + " |" for row in rows]
    known = {row["name"] for row in rows}
    missing = [f"`{row.name}`" for _, row in rows_of(CHECKS) if row.name not in known]
    others = f" Not run: {', '.join(missing)}." if missing else ""
    return [where, "", *head, *body, "", f"{totals(rows)}.{others}\n"]


def _meanings() -> list[str]:
    """What each row's value is, and its limit."""
    head = ["| row | value | unit | limit |", "|---|---|---|---|"]
    lines = []
    for _, row in rows_of(CHECKS):
        name = f"`{row.name}`" + (" (GPU only)" if row.gpu_only else "")
        limit = "none, reported" if row.limit is None else f"{row.limit:g}"
        lines.append(f"| {name} | {row.meaning} | {row.unit} | {limit} |")
    return [*head, *lines, ""]
