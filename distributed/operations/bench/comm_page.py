"""The results of ``bench comm`` as a table, and as a page with plots."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.operations.bench.comm import LIBRARY, Report, Row
from distributed.operations.report.formats import plural

if TYPE_CHECKING:
    from distributed.operations.report.html import Panel

__all__ = ["HEADS", "NOTES", "cells_of", "headline", "size_text", "text_table", "write_page"]

HEADS = [
    "operation",
    "algorithm",
    "size",
    "time (us)",
    "min to max",
    "algbw GB/s",
    "busbw GB/s",
    "check",
    "sent B/rank",
    "formula B/rank",
]
NOTES = [
    "size: the largest buffer of a rank. Times: median, minimum and maximum of the timed calls, each on the"
    " slowest rank.",
    "busbw: algbw times a factor of the operation and the number of ranks, by the convention of nccl-tests,"
    " whatever the library sends.",
    "sent and formula: bytes that a rank sends, as the mean over the ranks; measured where gloo sends"
    " over TCP, and as the operation needs at least (for a named algorithm: as it sends).",
]


def headline(report: Report) -> str:
    """Where and how it was measured, in a line."""
    plan = report.plan
    return (
        f"{plural(report.num_ranks, 'rank')} on {plural(report.hosts, 'host')}, {report.transport} between"
        f" {'GPUs' if report.device == 'cuda' else 'CPUs'}, {plan.dtype};"
        f" {plural(plan.iterations, 'timed call')} after {plan.warmup}"
    )


def size_text(nbytes: int) -> str:
    """A size as on the command line: ``64K``, ``1M``; other numbers as they are."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def cells_of(row: Row) -> list[str]:
    """A row of the table. Its result was right: otherwise there would be an error instead of a table."""
    return [
        row.operation,
        row.algorithm,
        size_text(row.nbytes),
        f"{row.median * 1e6:,.1f}",
        f"{min(row.seconds) * 1e6:,.1f} to {max(row.seconds) * 1e6:,.1f}",
        _gigabytes(row.algbw),
        _gigabytes(row.busbw),
        "ok",
        "" if row.sent is None else f"{row.sent:,.0f}",
        f"{row.formula:,.0f}",
    ]


def text_table(report: Report) -> list[str]:
    """The headline and the table as lines of plain text."""
    rows = [HEADS, *(cells_of(row) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [headline(report), *lines]


def _gigabytes(rate: float) -> str:
    """Three significant digits without an exponent."""
    value = rate * 1e-9
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def write_page(path: Path, report: Report) -> None:
    """Write the table and its plots as one HTML file.

    Raises:
        UserError: plotly is not installed, or the file cannot be written.
    """
    from distributed.operations.report import html

    html.check_plotly("a page of bench comm")
    panels = [
        _panel(report, "Bus bandwidth", "GB/s", lambda row, seconds: row.busbw * row.median / seconds * 1e-9),
        _panel(report, "Time", "us", lambda row, seconds: seconds * 1e6),
    ]
    table = html.table(HEADS, [cells_of(row) for row in report.rows], numbers=(2, 3, 4, 5, 6, 8, 9))
    body = [
        html.Html("<h1>Collectives</h1>\n"),
        html.paragraph(
            f"{headline(report)}. Points are medians, bars reach from the fastest to the slowest call."
        ),
        html.plots(panels),
        html.section("Figures", table, *map(html.paragraph, NOTES)),
    ]
    html.write(path, html.page("Collectives", body, panels))


def _panel(report: Report, title: str, unit: str, value: Callable[[Row, float], float]) -> Panel:
    from distributed.operations.report.figures import line_panel
    from distributed.operations.report.runs import Series

    lines: list[tuple[str, Series, dict[str, object]]] = []
    for color, (operation, algorithm) in enumerate(report.plan.cases):
        rows = [row for row in report.rows if (row.operation, row.algorithm) == (operation, algorithm)]
        middle = [value(row, row.median) for row in rows]
        ends = [sorted(value(row, s) for s in (min(row.seconds), max(row.seconds))) for row in rows]
        options: dict[str, object] = {
            "color": color % 8,
            "dash": "solid" if color < 8 else "dot",
            "points": True,
            "low": [m - low for m, (low, _) in zip(middle, ends, strict=True)],
            "high": [high - m for m, (_, high) in zip(middle, ends, strict=True)],
        }
        name = operation if algorithm == LIBRARY else f"{operation}, {algorithm}"
        lines.append((name, Series([row.nbytes for row in rows], middle), options))
    panel = line_panel(title, lines, unit=unit, x="size")
    # Equal parts make some sizes a little smaller.
    sizes = list(report.plan.sizes)
    panel.figure.update_xaxes(type="log", tickvals=sizes, ticktext=[size_text(size) for size in sizes])
    panel.figure.update_yaxes(type="log")
    return panel
