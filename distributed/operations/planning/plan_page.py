"""The table of plans as a page: each plan's time and memory by part as a bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from html import escape
from pathlib import Path

from distributed.operations.planning.plan_text import (
    HEADS,
    headline,
    part_rows,
    rows_of,
    settings_of,
    uncertainty,
)
from distributed.operations.planning.plans import Plans
from distributed.operations.planning.quantities import memory_text, seconds_text
from distributed.operations.report import html
from distributed.operations.report.figures import stacked_bars
from distributed.operations.report.html import Html, Panel
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.search import Ranked
from distributed.planner.estimates.time import TimeParts

__all__ = ["write_page"]

_BARS = 12
"""Most plans of which bars are drawn."""
_REASONS = 200
"""Most rejected candidates that the page names one by one."""


def write_page(plans: Plans, path: str | Path) -> None:
    """Write an HTML page with the table and a picture of time and memory.

    Raises:
        UserError: it cannot be written there.
    """
    html.write(Path(path), _page(plans), "--html")


def _page(plans: Plans) -> str:
    panels, best = _panels(plans), plans[0]
    title = f"Plans for {plans.subject}"
    time, memory = part_rows(plans)
    uncertain = uncertainty(plans)
    table = html.table(HEADS, list(rows_of(plans)), numbers=(0, 5, 7, 8, 9), best=0)
    below = [html.note(uncertain)] if uncertain else []
    body = [
        Html(f"<h1>{escape(title)}</h1>\n"),
        html.paragraph(f"{headline(plans)}."),
        *map(html.note, plans.notes),
        html.facts(
            [
                ("step of the fastest plan", seconds_text(best.time.total)),
                ("of the peak rate (MFU)", f"{best.mfu:.1%}"),
                (f"of {memory_text(plans.profile.memory)} a device", memory_text(best.memory.total)),
            ]
        ),
        html.section("Plans", table, *below),
        html.section("Where time and memory go", html.plots(panels)),
        html.section(
            "The fastest plan by part",
            html.table(["time of a step", "", "share"], time, numbers=(1, 2)),
            html.table(["memory of the rank that needs most", "", "share"], memory, numbers=(1, 2)),
        ),
        html.section("Rejected", _reasons(plans), _rejected(plans)),
    ]
    return html.page(title, body, panels)


def _panels(plans: Plans) -> list[Panel]:
    shown = plans.rows[:_BARS]
    names = [f"{number}. {_name(row)}" for number, row in enumerate(shown, 1)]
    times = dict(zip(names, (_scaled(row.time, 1.0) for row in shown), strict=True))
    memories = dict(zip(names, (_scaled(row.memory, 1e-9) for row in shown), strict=True))
    return [
        stacked_bars(
            "Predicted time of a step", times, "s", "Mean over the ranks.", parts=_parts_of(TimeParts)
        ),
        stacked_bars(
            "Predicted memory of a rank",
            memories,
            "GB",
            f"At the peak of the rank that needs most. A device has {memory_text(plans.profile.memory)}.",
            parts=_parts_of(MemoryParts),
        ),
    ]


def _name(row: Ranked) -> str:
    settings = settings_of(row)
    return f"{row.split.backend}, {row.split.dims}" + (f", {settings}" if settings else "")


def _parts_of(kind: type[TimeParts] | type[MemoryParts]) -> list[str]:
    return [field.name.replace("_", " ") for field in fields(kind)]


def _scaled(parts: TimeParts | MemoryParts, scale: float) -> Mapping[str, float]:
    return {field.name.replace("_", " "): getattr(parts, field.name) * scale for field in fields(parts)}


def _reasons(plans: Plans) -> Html:
    rows = [[reason, f"{count:,}"] for reason, count in plans.table.reasons().most_common()]
    return html.table(["first reason", "splits"], rows, numbers=(1,)) if rows else Html("")


def _rejected(plans: Plans) -> Html:
    rejected = plans.table.rejected
    rows = [[entry.subject, entry.reason] for entry in rejected[:_REASONS]]
    title = f"The first {len(rows)} of {len(rejected):,} rejected splits, and groups of them, one by one"
    return html.unfold(title, html.table(["split", "first reason"], rows)) if rows else Html("")
