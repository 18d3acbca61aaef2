"""The figure of `docs/architecture.md`: the packages of `distributed`, drawn from their imports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from html import escape

__all__ = ["Edges", "draw"]

Edges = Mapping[str, set[str]]
"""Package -> packages that it imports."""

_WIDTH, _HEIGHT, _GAP, _LEVEL, _MARGIN = 124, 30, 18, 62, 12
_STYLE = (
    "text{font:13px system-ui,sans-serif;text-anchor:middle;fill:#1b1f24}"
    "rect{fill:#f6f8fa;stroke:#57606a;rx:5}path{fill:none;stroke:#8c959f}.bg{fill:#fff;stroke:none}"
)


def draw(edges: Edges) -> str:
    """An SVG in which each package stands above all that it imports.

    Args:
        edges: without circles; an edge that follows from a longer way should be left out.
    """
    levels = _levels(edges)
    rows, chains = _rows(edges, levels)
    _untangle(rows, chains)
    where = _positions(rows)
    width = max(x for x, _ in where.values()) + _WIDTH / 2 + _MARGIN
    height = _MARGIN * 2 + _LEVEL * (len(rows) - 1) + _HEIGHT
    lines = [_line([where[node] for node in chain]) for chain in chains]
    boxes = [_box(name, *where[name]) for name in sorted(levels)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
    body = "\n".join([*lines, *boxes])
    return f'{head}<style>{_STYLE}</style><rect class="bg" width="100%" height="100%"/>\n{body}\n</svg>\n'


def _levels(edges: Edges) -> dict[str, int]:
    """Package -> length of its longest way down to a package that imports nothing."""
    levels: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in levels:
            levels[name] = max((level(other) + 1 for other in edges.get(name, ())), default=0)
        return levels[name]

    for name in edges:
        level(name)
    return levels


def _rows(edges: Edges, levels: Mapping[str, int]) -> tuple[list[list[str]], list[list[str]]]:
    """Nodes by level, the top first, and each edge as a chain of nodes, one on each level it crosses."""
    top = max(levels.values())
    rows: list[list[str]] = [[] for _ in range(top + 1)]
    for name in sorted(levels):
        rows[top - levels[name]].append(name)
    chains = []
    for source in sorted(edges):
        for target in sorted(edges[source]):
            crossed = range(levels[source] - 1, levels[target], -1)
            bends = [f"{source}>{target}@{level}" for level in crossed]
            for level, bend in zip(crossed, bends, strict=True):
                rows[top - level].append(bend)
            chains.append([source, *bends, target])
    return rows, chains


def _untangle(rows: list[list[str]], chains: list[list[str]]) -> None:
    """Order each row by the mean position of the neighbours, down and up in turns."""
    neighbours: dict[str, set[str]] = {}
    for chain in chains:
        for above, below in itertools.pairwise(chain):
            neighbours.setdefault(above, set()).add(below)
            neighbours.setdefault(below, set()).add(above)
    for _ in range(12):
        for ordered in (rows, rows[::-1]):
            for fixed, row in itertools.pairwise(ordered):
                place = {node: index / max(1, len(fixed) - 1) for index, node in enumerate(fixed)}
                row.sort(key=lambda node: _mean([place[n] for n in neighbours[node] if n in place]))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.5


def _size(node: str) -> float:
    return _GAP if ">" in node else _WIDTH


def _positions(rows: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Node -> its centre, in pixels; rows are centred."""
    widths = [sum(map(_size, row)) + _GAP * (len(row) - 1) for row in rows]
    found = {}
    for index, (row, width) in enumerate(zip(rows, widths, strict=True)):
        left = _MARGIN + (max(widths) - width) / 2
        for node in row:
            found[node] = left + _size(node) / 2, _MARGIN + index * _LEVEL + _HEIGHT / 2
            left += _size(node) + _GAP
    return found


def _line(points: list[tuple[float, float]]) -> str:
    (x, y), *rest = points
    path = [f"M{x:.0f} {y:.0f}"]
    for to_x, to_y in rest:
        middle = (y + to_y) / 2
        path.append(f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}")
        x, y = to_x, to_y
    return f'<path d="{"".join(path)}"/>'


def _box(name: str, x: float, y: float) -> str:
    left, top = x - _WIDTH / 2, y - _HEIGHT / 2
    box = f'<rect x="{left:.0f}" y="{top:.0f}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    return f'{box}<text x="{x:.0f}" y="{y + 4.5:.0f}">{escape(name)}</text>'
