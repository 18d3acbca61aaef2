"""The figure of the page on communication: step time and loss over slow links, from the rows of `slow_link`.

python -m tests.benchmarks.slow_link --output rows.json
python -m tests.benchmarks.slow_link_figure rows.json > docs/slow-links.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_ROW, _HEAD, _BARS, _BAR_WIDTH, _LOSS, _LOSS_WIDTH, _WIDTH = 20, 62, 210, 190, 500, 330, 860
_LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "20ms": "20 ms round trip"}
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f24}.t{font-weight:600;font-size:14px}.n{text-anchor:end}"
    ".s{fill:#57606a}.bar{fill:#4c78a8}.dense{fill:#9aa4ae}.steps{fill:#fff;stroke:#e4572e;stroke-width:2}"
    ".time{fill:#e4572e}.grid{stroke:#d8dee4}.bg{fill:#fff}"
)


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG with a panel for each link and a line for each method.

    Args:
        rows: of `slow_link`, those of a link next to each other, dense gradients (`none`) first.
    """
    panels = [list(panel) for _, panel in groupby(rows, key=lambda row: row["link"])]
    axis = _loss_axis(rows)
    lines: list[str] = []
    top = 0
    for panel in panels:
        lines += _panel(panel, top, axis)
        top += _HEAD + _ROW * len(panel) + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}">'
    body = "\n".join(lines)
    return f'{head}<style>{_STYLE}</style><rect class="bg" width="100%" height="100%"/>\n{body}\n</svg>\n'


def _loss_axis(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Ends of the axis of losses: the largest ones are marked at its end."""
    losses = sorted(loss for row in rows for loss in _losses(row))
    most = losses[int(len(losses) * 0.85)]
    return int(losses[0] * 10) / 10, int(most * 10 + 1) / 10


def _losses(row: dict[str, Any]) -> tuple[float, float]:
    return row["loss after steps"], row["loss after seconds"]


def _panel(rows: Sequence[dict[str, Any]], top: int, axis: tuple[float, float]) -> Iterator[str]:
    dense = rows[0]["ms per step"]
    longest = max(row["ms per step"] for row in rows) / dense
    bottom = top + _HEAD + _ROW * len(rows)
    yield f'<text class="t" x="12" y="{top + 24}">{_LINKS.get(rows[0]["link"], rows[0]["link"])}</text>'
    yield f'<text class="s" x="{_BARS}" y="{top + 48}">time of a step / dense</text>'
    yield from _legend(top + 24)
    low, high = axis
    for tick in range(5):
        loss = low + (high - low) * tick / 4
        x = _LOSS + _LOSS_WIDTH * tick / 4
        yield f'<line class="grid" x1="{x:.0f}" x2="{x:.0f}" y1="{top + 54}" y2="{bottom}"/>'
        yield f'<text class="s" x="{x - 10:.0f}" y="{top + 48}">{loss:.2f}</text>'
    for index, row in enumerate(rows):
        middle = top + _HEAD + _ROW * index + _ROW // 2
        yield from _line(row, middle, dense, longest, axis)


def _legend(y: int) -> Iterator[str]:
    yield f'<circle class="steps" cx="{_LOSS}" cy="{y - 4}" r="5"/>'
    yield f'<text x="{_LOSS + 12}" y="{y}">loss after equal steps</text>'
    yield f'<circle class="time" cx="{_LOSS + 170}" cy="{y - 4}" r="5"/>'
    yield f'<text x="{_LOSS + 182}" y="{y}">after equal time</text>'


def _line(
    row: dict[str, Any], y: int, dense: float, longest: float, axis: tuple[float, float]
) -> Iterator[str]:
    ratio = row["ms per step"] / dense
    width = _BAR_WIDTH * ratio / longest
    name = "dense" if row["method"] == "none" else row["method"]
    yield f'<text class="n" x="{_BARS - 10}" y="{y + 4}">{escape(name)}</text>'
    kind = "dense" if row["method"] == "none" else "bar"
    yield f'<rect class="{kind}" x="{_BARS}" y="{y - 7}" width="{width:.1f}" height="14"/>'
    yield f'<text x="{_BARS + width + 6:.1f}" y="{y + 4}">{ratio:.2f} ({row["ms per step"]:.0f} ms)</text>'
    low, high = axis
    for kind, loss in zip(("steps", "time"), _losses(row), strict=True):
        x = _LOSS + _LOSS_WIDTH * (min(loss, high) - low) / (high - low)
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="5"/>'
    if max(_losses(row)) > high:
        beyond = ", ".join(f"{loss:.1f}" for loss in _losses(row) if loss > high)
        yield f'<text class="n s" x="{_LOSS + _LOSS_WIDTH - 12}" y="{y + 4}">{beyond} →</text>'


if __name__ == "__main__":
    print(draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
