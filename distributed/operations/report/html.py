"""Pages of plots: each is one self-contained HTML file."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed._version import __version__
from distributed.errors import UserError
from distributed.registry.catalog import require
from distributed.system.private_files import write_private

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,">
"""


_SHORT = 24
"""Characters of a cell that stay on one line."""
_MANY = 8
"""Columns up to which a table has wide margins between them."""
_TAG = re.compile("<[^>]*>")


class Html(str):
    """Text that is HTML already. Any other text is escaped where it goes into a page."""


@dataclass(frozen=True)
class Panel:
    """One plot. The page sets its colours, because there are two sets of them.

    A trace selects its colour by ``meta``: ``{"color": n}``, the n-th of the page's series, and
    ``"faint"``, ``"hidden"`` from the legend, or ``"share"``, how much of the colour from 0 to 1. A shape
    selects it by its name: ``resume`` or ``failure``.

    Attributes:
        title: heading above the plot.
        figure: plotly's figure.
        note: sentence below the plot, may be empty.
        wide: whether it spans the width of the page.
        min_width: pixels; where there are fewer, the plot scrolls by itself.
    """

    title: str
    figure: Figure
    note: str = ""
    wide: bool = False
    min_width: int = 0

    def legend(self) -> list[tuple[str, int, str]]:
        """(name, colour, ``fill``, ``point``, ``solid`` or ``dot``) of what is drawn; nothing for one
        line alone."""
        traces = [
            trace for trace in self.figure.data if not (trace.meta.get("faint") or trace.meta.get("hidden"))
        ]
        if len(traces) < 2:
            return []
        return [(trace.name, trace.meta["color"], _mark_of(trace)) for trace in traces]


def _mark_of(trace: Any) -> str:
    if trace.type == "bar" or trace.stackgroup:
        return "fill"
    return "point" if trace.mode == "markers" else str(trace.line.dash or "solid")


def check_plotly(what: str = "the report") -> None:
    """Raise a UserError with the command to run when plotly is not installed.

    Args:
        what: feature that needs plotly.
    """
    require(("plotly",), what, "pip install 'distributed-trainer[report]'")


def _html(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def section(title: str, *parts: Html) -> Html:
    """A heading and its content; empty without content."""
    inner = "".join(parts)
    return Html(f"<section><h2>{_html(title)}</h2>{inner}</section>\n" if inner else "")


def paragraph(text: str) -> Html:
    """A paragraph in the size of the page's first sentence."""
    return Html(f"<p class=lead>{_html(text)}</p>\n")


def note(text: str) -> Html:
    """A sentence that should not be overlooked."""
    return Html(f'<p class="note">{_html(text)}</p>\n')


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Key values: (what, value)."""
    cells = "".join(
        f'<div class="fact"><b>{_html(value)}</b><span>{_html(what)}</span></div>' for what, value in pairs
    )
    return Html(f'<div class="facts">{cells}</div>\n')


def unfold(title: str, *parts: Html) -> Html:
    """Content that the reader can unfold."""
    return Html(f"<details><summary>{_html(title)}</summary>{''.join(parts)}</details>\n")


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), best: int | None = None
) -> Html:
    """A table that scrolls by itself where it is too wide.

    Args:
        rows: texts, or `Html`.
        numbers: indices of the right-aligned columns.
        best: index of the highlighted row.
    """
    kinds = [' class="number"' if index in numbers else "" for index in range(len(heads))]
    head = "".join(f"<th{kind}>{_html(text)}</th>" for text, kind in zip(heads, kinds, strict=True))
    body = "".join(
        f"<tr{' class=best' if number == best else ''}>"
        + "".join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))
        + "</tr>\n"
        for number, row in enumerate(rows)
    )
    dense = " dense" if len(heads) > _MANY else ""
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return Html(f'<div class="table{dense}">{inner}</div>\n')


def _cell(text: str, kind: str) -> str:
    # A short cell is easier to read on one line, also where a table has to scroll.
    seen = _TAG.sub("", text) if isinstance(text, Html) else text
    kind = kind or (' class="short"' if len(seen) <= _SHORT else "")
    return f"<td{kind}>{_html(text)}</td>"


def plots(panels: Sequence[Panel], first: int = 0, key: str = "") -> Html:
    """Elements for plots, two per row where they fit.

    Args:
        first: number of plots on the page before these.
        key: HTML that explains marks which several of them have.
    """
    cells = []
    for number, panel in enumerate(panels, first):
        caption = f"<figcaption>{_html(panel.note)}</figcaption>" if panel.note else ""
        height = panel.figure.layout.height or 300
        cells.append(
            f"<figure{' class=wide' if panel.wide else ''}><h3>{_html(panel.title)}</h3>"
            f'<div class="scroll"><div class="plot" id="plot-{number}" role="img"'
            f' style="height:{height:.0f}px;min-width:{panel.min_width}px"'
            f' aria-label="{escape(panel.title)}"></div></div>{_legend(panel)}{caption}</figure>'
        )
    explained = f'<p class="quiet">{key}</p>' if key else ""
    return Html(f'{explained}<div class="plots">{"".join(cells)}</div>\n') if cells else Html("")


def _legend(panel: Panel) -> str:
    # Names in a plot are escaped already, because plotly accepts some HTML in them.
    marks = [
        f'<span><i class="mark {kind}" style="--own:var(--c{colour % 8})"></i>{name}</span>'
        for name, colour, kind in panel.legend()
    ]
    return f'<div class="legend">{"".join(marks)}</div>' if marks else ""


def page(title: str, body: Sequence[Html], panels: Sequence[Panel]) -> str:
    """The whole file.

    Args:
        body: content, with an element for each of `panels`, from `plots`.
        panels: all plots of the page, in order.
    """
    drawn = ""
    if panels:
        from plotly.offline import get_plotlyjs

        figures = json.dumps([json.loads(panel.figure.to_json()) for panel in panels])
        # "</script>" in a name would end the script.
        figures = figures.replace("<", "\\u003c")
        drawn = (
            f'<script type="application/json" id="figures">{figures}</script>\n'
            f"<script>{get_plotlyjs()}</script>\n<script>{_part('html.js')}</script>\n"
        )
    made = f"Made on {time.strftime('%Y-%m-%d %H:%M')} by distributed-trainer {__version__}."
    return (
        f"{_HEAD}<title>{escape(title)}</title>\n<style>{_part('html.css')}</style>\n</head>\n<body>\n<main>\n"
        f"{''.join(body)}"
        "<noscript><p class=note>The plots need JavaScript, which is off here.</p></noscript>\n"
        f"<footer>{made}</footer>\n</main>\n{drawn}</body>\n</html>\n"
    )


def write(path: Path, text: str, field: str = "--output") -> None:
    """Write a page whole or not at all, readable by this user only.

    Args:
        path: path of the file, in a folder that exists.
        text: HTML from `page`.
        field: flag or argument that named the path, for the error.

    Raises:
        UserError: it cannot be written there.
    """
    try:
        write_private(path, text.encode("utf-8"))
    except OSError as error:
        raise UserError(
            f"the page cannot be written: {error.strerror or error}", field=field, got=str(path)
        ) from None


@cache
def _part(name: str) -> str:
    return files("distributed.operations.report").joinpath(name).read_text(encoding="utf-8")
