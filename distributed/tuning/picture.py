"""A picture of a search: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.checkpoint.best import larger_is_better
from distributed.plugin_manager import require
from distributed.tuning.record import Trial, is_number

__all__ = ["write_picture"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --ground: #ffffff; --ink: #1c2430; --quiet: #5d6878; --line: #d9dee5; --mark: #0f62a8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #14181d; --ink: #e4e8ed; --quiet: #9aa5b3; --line: #323a44; --mark: #6db3f2; }}
}}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; margin: 0.5rem 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 1.5rem 0 0.25rem; }}
p {{ margin: 0.25rem 0; color: var(--quiet); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th {{ color: var(--quiet); font-weight: 500; }}
tr.best td {{ color: var(--mark); font-weight: 600; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<h2>Course of the search</h2>
<div id="course"></div>
<h2>Parameters and {metric}</h2>
<p>One line for each trial, the strongest colour for the best.</p>
<div class="wide"><div id="lines" style="min-width: {width}px"></div></div>
<h2>Trials</h2>
<div class="wide">{table}</div>
<script>
const figures = {figures};
const dark = matchMedia("(prefers-color-scheme: dark)");
function mix(from, to, share) {{
  const part = (text, n) => parseInt(text.slice(2 * n + 1, 2 * n + 3), 16);
  const parts = [0, 1, 2].map((n) => Math.round(part(from, n) * (1 - share) + part(to, n) * share));
  return `rgb(${{parts.join(",")}})`;
}}
function draw() {{
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  for (const [id, figure] of Object.entries(figures)) {{
    const layout = structuredClone(figure.layout);
    const data = structuredClone(figure.data);
    layout.width = document.getElementById(id).clientWidth;
    layout.paper_bgcolor = layout.plot_bgcolor = color("--ground");
    layout.font = {{ color: color("--ink"), family: "system-ui, sans-serif", size: 13 }};
    for (const axis of [layout.xaxis, layout.yaxis]) {{
      Object.assign(axis, {{ gridcolor: color("--line"), zerolinecolor: color("--line") }});
    }}
    for (const note of layout.annotations || []) note.bgcolor = color("--ground") + "b0";
    for (const shape of layout.shapes || []) shape.line.color = color("--quiet");
    for (const trace of data) {{
      if (trace.mode === "markers") trace.marker.color = color("--quiet");
      else trace.line.color = mix(color("--line"), color("--mark"), trace.meta);
    }}
    Plotly.react(id, data, layout, {{ displaylogo: false, displayModeBar: false }});
  }}
}}
dark.addEventListener("change", draw);
addEventListener("resize", draw);
draw();
</script>
</body>
</html>
"""


def write_picture(
    trials: Sequence[Trial], mode: str, best: Trial, path: str | os.PathLike[str], title: str
) -> str:
    """Write the page and return its path.

    Args:
        trials: of one search.
        mode: as of the search.
        best: the best of them.
        path: of the file.
        title: of the page.

    Raises:
        UserError: plotly is not installed.
    """
    require(("plotly",), "a picture of a search", "pip install 'distributed-trainer[report]'")
    from plotly.offline import get_plotlyjs

    from distributed.transport import write_private

    judged = sorted((t for t in trials if t.value is not None), key=lambda trial: trial.name)
    metric = str(best.metric)
    axes = _axes(judged, metric)
    page = _PAGE.format(
        title=html.escape(title),
        metric=html.escape(metric),
        summary=html.escape(_summary(trials, best)),
        plotly=get_plotlyjs(),
        width=120 * (len(axes) + 1),
        table=_table(trials, best, metric),
        figures=_json({"course": _course(judged, metric, mode), "lines": _lines(judged, axes, metric, mode)}),
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_private(target, page.encode())
    return str(target)


def _summary(trials: Sequence[Trial], best: Trial) -> str:
    states = [trial.status for trial in trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    sampled = ", ".join(f"{name} {_text(value)}" for name, value in best.parameters.items())
    return f"{len(trials)} trials: {counts}. Best {best.metric}: {_text(best.value)}, with {sampled}."


def _course(trials: Sequence[Trial], metric: str, mode: str) -> dict[str, Any]:
    """Each trial's value in the order of the samples, and the best up to there."""
    from plotly import graph_objects as go

    better = max if larger_is_better(mode, metric) else min
    values = [float(trial.value or 0.0) for trial in trials]
    so_far = [better(values[: n + 1]) for n in range(len(values))]
    numbers = list(range(1, len(values) + 1))
    texts = [html.escape(f"trial {trial.name}: {_of(trial)}") for trial in trials]
    figure = go.Figure(
        [
            go.Scatter(
                x=numbers,
                y=values,
                mode="markers",
                name="trial",
                meta="other",
                text=texts,
                hoverinfo="text+y",
                marker={"size": 8},
            ),
            go.Scatter(x=numbers, y=so_far, mode="lines", name="best so far", line={"shape": "hv"}, meta=1.0),
        ],
        {
            "xaxis": {"title": {"text": "trial"}, "tickformat": "d", "rangemode": "tozero"},
            "yaxis": {"title": {"text": html.escape(metric)}},
            "legend": {"orientation": "h", "y": 1.12, "x": 0},
            "margin": {"l": 60, "r": 10, "t": 30, "b": 50},
            "height": 340,
        },
    )
    return _plain(figure)


def _lines(trials: Sequence[Trial], axes: Sequence[_Axis], metric: str, mode: str) -> dict[str, Any]:
    """Parallel coordinates, drawn as plain lines: no browser is without them, and paper has them too."""
    from plotly import graph_objects as go

    sign = 1.0 if larger_is_better(mode, metric) else -1.0
    places = _places([sign * float(trial.value or 0.0) for trial in trials])
    numbers = sorted(range(len(trials)), key=lambda n: places[n])
    lines = [
        go.Scatter(
            x=list(range(len(axes))),
            y=[axis.heights[n] for axis in axes],
            mode="lines",
            meta=0.25 + 0.75 * places[n] ** 2,
            line={"width": 3.5 if places[n] == 1.0 else 1.8},
            text=html.escape(f"trial {trials[n].name}: {metric} {_text(trials[n].value)}, {_of(trials[n])}"),
            hoverinfo="text",
        )
        for n in numbers
    ]
    hidden = {"visible": False, "fixedrange": True}
    layout = {
        "showlegend": False,
        "xaxis": {**hidden, "range": [-0.6, len(axes) - 0.5]},
        "yaxis": {**hidden, "range": [-0.06, 1.14]},
        "shapes": [
            {"type": "line", "x0": n, "x1": n, "y0": 0, "y1": 1, "line": {"width": 1}}
            for n in range(len(axes))
        ],
        "annotations": [note for n, axis in enumerate(axes) for note in _notes(n, axis)],
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "height": 380,
        "hovermode": "closest",
    }
    return _plain(go.Figure(lines, layout))


def _notes(n: int, axis: _Axis) -> list[dict[str, Any]]:
    """The axis's name above it, and its ticks to its left."""
    name = {"x": n, "y": 1.1, "text": f"<b>{html.escape(axis.name)}</b>", "showarrow": False}
    ticks = [
        {"x": n, "y": height, "text": html.escape(text), "xanchor": "right", "xshift": -5, "showarrow": False}
        for height, text in axis.ticks
    ]
    return [name, *ticks]


def _places(values: Sequence[float]) -> list[float]:
    """The place of each value among all, 0 for the worst and 1 for the best: outliers do not wash out
    the colours."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    last = max(1, len(values) - 1)
    return [order.index(n) / last if len(values) > 1 else 1.0 for n in range(len(values))]


@dataclass(frozen=True)
class _Axis:
    name: str
    heights: list[float]
    ticks: list[tuple[float, str]]


def _axes(trials: Sequence[Trial], metric: str) -> list[_Axis]:
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    columns = {name: [trial.parameters.get(name) for trial in trials] for name in names}
    varied = {name: column for name, column in columns.items() if len(set(map(repr, column))) > 1}
    axes = [_axis(name, column) for name, column in varied.items()]
    return [*axes, _axis(metric, [trial.value for trial in trials])]


def _axis(name: str, column: Sequence[Any]) -> _Axis:
    kinds = sorted({_text(value) for value in column}, key=lambda text: (len(text), text))
    if not all(is_number(value) for value in column) or len(kinds) <= 4:
        last = max(1, len(kinds) - 1)
        heights = [kinds.index(_text(value)) / last for value in column]
        return _Axis(name, heights, [(n / last, kind) for n, kind in enumerate(kinds)])
    numbers = [float(value) for value in column]
    if min(numbers) > 0 and max(numbers) / min(numbers) > 30:
        return _scaled(name, [math.log10(number) for number in numbers], lambda height: f"{10**height:.2g}")
    return _scaled(name, numbers, lambda height: f"{height:.3g}")


def _scaled(name: str, numbers: Sequence[float], text: Callable[[float], str]) -> _Axis:
    low, high = min(numbers), max(numbers)
    width = high - low or 1.0
    ticks = [(n / 4, text(low + width * n / 4)) for n in range(5)]
    return _Axis(name, [(number - low) / width for number in numbers], ticks)


def _table(trials: Sequence[Trial], best: Trial, metric: str) -> str:
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    head = ["trial", metric, *names, "status", "epochs", "seconds"]
    rows = [_row([html.escape(word) for word in head], "th")]
    for trial in trials:
        epochs = sum("epoch" in report for report in trial.reports)
        state = trial.status if trial.error is None else f"{trial.status}: {trial.error[:80]}"
        cells = [trial.name, _text(trial.value), *(_text(trial.parameters.get(name)) for name in names)]
        cells += [state, str(epochs), f"{trial.seconds:.1f}"]
        rows.append(_row([html.escape(cell) for cell in cells], "td", trial.name == best.name))
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Sequence[str], tag: str, is_best: bool = False) -> str:
    inside = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
    mark = ' class="best"' if is_best else ""
    return f"<tr{mark}>{inside}</tr>"


def _of(trial: Trial) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in trial.parameters.items())


def _plain(figure: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": figure.to_plotly_json()["data"],
        "layout": figure.to_plotly_json()["layout"],
    }
    found["layout"].pop("template", None)
    return found


def _json(value: Mapping[str, Any]) -> str:
    import json

    from plotly.utils import PlotlyJSONEncoder

    # Nothing in a name may end the script that it stands in.
    return json.dumps(value, cls=PlotlyJSONEncoder).replace("<", "\\u003c")


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
