"""A picture of a search: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
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
<p>One line for each trial; drag along an axis to pick lines out.</p>
<div class="wide"><div id="lines" style="min-width: {width}px"></div></div>
<h2>Trials</h2>
<div class="wide">{table}</div>
<script>
const figures = {figures};
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {{
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  for (const [id, figure] of Object.entries(figures)) {{
    const layout = structuredClone(figure.layout);
    const data = structuredClone(figure.data);
    layout.paper_bgcolor = layout.plot_bgcolor = color("--ground");
    layout.font = {{ color: color("--ink"), family: "system-ui, sans-serif", size: 13 }};
    for (const axis of [layout.xaxis, layout.yaxis]) {{
      if (axis) Object.assign(axis, {{ gridcolor: color("--line"), zerolinecolor: color("--line") }});
    }}
    for (const trace of data) {{
      if (trace.type === "parcoords") {{
        trace.line.colorscale = [[0, color("--line")], [1, color("--mark")]];
        trace.unselected = {{ line: {{ color: color("--line"), opacity: 0.3 }} }};
      }} else if (trace.mode === "lines") trace.line.color = color("--mark");
      else if (trace.meta === "other") trace.marker.color = color("--quiet");
      else trace.marker.color = color("--mark");
    }}
    Plotly.react(id, data, layout, {{ responsive: true, displaylogo: false, displayModeBar: false }});
  }}
}}
dark.addEventListener("change", draw);
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
    axes = _axes(judged, metric, mode)
    page = _PAGE.format(
        title=html.escape(title),
        metric=html.escape(metric),
        summary=html.escape(_summary(trials, best)),
        plotly=get_plotlyjs(),
        width=110 * len(axes),
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
            go.Scatter(x=numbers, y=so_far, mode="lines", name="best so far", line={"shape": "hv"}),
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


def _lines(trials: Sequence[Trial], axes: list[dict[str, Any]], metric: str, mode: str) -> dict[str, Any]:
    from plotly import graph_objects as go

    sign = 1.0 if larger_is_better(mode, metric) else -1.0
    ranks = _ranks([sign * float(trial.value or 0.0) for trial in trials])
    figure = go.Figure(
        go.Parcoords(dimensions=axes, line={"color": ranks, "cmin": 0, "cmax": max(1, len(trials) - 1)}),
        {"margin": {"l": 60, "r": 60, "t": 60, "b": 30}, "height": 380},
    )
    return _plain(figure)


def _ranks(values: Sequence[float]) -> list[int]:
    """The place of each value among all, 0 for the worst: outliers do not wash out the colours."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    return [order.index(n) for n in range(len(values))]


def _axes(trials: Sequence[Trial], metric: str, mode: str) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    columns = {name: [trial.parameters.get(name) for trial in trials] for name in names}
    varied = {name: column for name, column in columns.items() if len(set(map(repr, column))) > 1}
    axes = [_axis(name, column) for name, column in varied.items()]
    return [*axes, _axis(metric, [trial.value for trial in trials])]


def _axis(name: str, column: Sequence[Any]) -> dict[str, Any]:
    label = html.escape(name)
    kinds = sorted({_text(value) for value in column}, key=lambda text: (len(text), text))
    if not all(is_number(value) for value in column) or (len(kinds) <= 4 and _are_whole(column)):
        kinds = [_text(v) for v in sorted(set(column))] if _are_whole(column) else kinds
        places = [kinds.index(_text(value)) for value in column]
        return {
            "label": label,
            "values": places,
            "tickvals": list(range(len(kinds))),
            "ticktext": [html.escape(kind) for kind in kinds],
            "range": [-0.2, len(kinds) - 0.8],
        }
    numbers = [float(value) for value in column]
    if min(numbers) > 0 and max(numbers) / min(numbers) > 30:
        logs = [math.log10(number) for number in numbers]
        ticks = list(range(math.floor(min(logs)), math.ceil(max(logs)) + 1))
        return {
            "label": label,
            "values": logs,
            "tickvals": ticks,
            "ticktext": [f"{10.0**tick:g}" for tick in ticks],
            "range": [ticks[0], ticks[-1]],
        }
    return {"label": label, "values": numbers}


def _are_whole(column: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in column)


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
