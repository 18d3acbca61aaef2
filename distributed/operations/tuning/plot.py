"""Plot of a search, as one self-contained HTML file."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.interfaces.metric import larger_is_better
from distributed.operations.report.formats import cell
from distributed.operations.report.html import (
    Html,
    Panel,
    check_plotly,
    page,
    paragraph,
    plots,
    section,
    table,
    write,
)
from distributed.operations.tuning.trial_record import Trial, is_number

_BEST, _QUIET = 0, 7
"""Index into the page's colours."""
_WIDTH, _ROOM = 130, 18
"""Width of an axis in pixels, and the characters that fit into it."""


def write_plot(
    trials: Sequence[Trial], mode: str, best: Trial, path: str | os.PathLike[str], title: str
) -> str:
    """Write the page and return its path.

    Raises:
        UserError: plotly is not installed.
    """
    check_plotly("a plot of a search")
    judged = sorted((trial for trial in trials if trial.counts), key=lambda trial: trial.name)
    metric = str(best.metric)
    panels = [_course(judged, metric, mode), _lines(judged, _axes(judged, metric), metric, mode)]
    body = [
        Html(f"<h1>{html.escape(title)}</h1>\n"),
        paragraph(_summary(trials, best)),
        plots(panels),
        section("Trials", _table(trials, best, metric)),
    ]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write(target, page(title, body, panels), "path")
    return str(target)


def _summary(trials: Sequence[Trial], best: Trial) -> str:
    states = [trial.status for trial in trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    sampled = ", ".join(f"{name} {cell(value)}" for name, value in best.parameters.items())
    return f"{len(trials)} trials: {counts}. Best {best.metric}: {cell(best.value)}, with {sampled}."


def _course(trials: Sequence[Trial], metric: str, mode: str) -> Panel:
    """Each trial's value in the order of the samples, and the best so far."""
    from plotly import graph_objects as go

    better = max if larger_is_better(mode, metric) else min
    values = [float(trial.value or 0.0) for trial in trials]
    so_far = [better(values[: n + 1]) for n in range(len(values))]
    numbers = list(range(1, len(values) + 1))
    each = go.Scatter(
        x=numbers,
        y=values,
        mode="markers",
        name="a trial",
        meta={"color": _QUIET},
        text=[html.escape(f"trial {trial.name}: {_of(trial)}") for trial in trials],
        hoverinfo="text+y",
        marker={"size": 8},
    )
    best = go.Scatter(
        x=numbers, y=so_far, mode="lines", name="best so far", line={"shape": "hv"}, meta={"color": _BEST}
    )
    layout = {
        "template": None,
        "xaxis": {"title": {"text": "trial"}, "tickformat": "d", "rangemode": "tozero", "zeroline": False},
        "yaxis": {"title": {"text": html.escape(metric)}, "automargin": True, "zeroline": False},
        "showlegend": False,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 45},
        "height": 340,
    }
    return Panel("Course of the search", go.Figure([each, best], layout), wide=True)


def _lines(trials: Sequence[Trial], axes: Sequence[_Axis], metric: str, mode: str) -> Panel:
    """Parallel coordinates, drawn as plain lines, which print and need no WebGL."""
    from plotly import graph_objects as go

    sign = 1.0 if larger_is_better(mode, metric) else -1.0
    places = _places([sign * float(trial.value or 0.0) for trial in trials])
    numbers = sorted(range(len(trials)), key=lambda n: places[n])
    lines = [
        go.Scatter(
            x=list(range(len(axes))),
            y=[axis.heights[n] for axis in axes],
            mode="lines",
            meta={"color": _BEST, "share": 0.25 + 0.75 * places[n] ** 2, "hidden": True},
            line={"width": 3.5 if places[n] == 1.0 else 1.8},
            text=html.escape(f"trial {trials[n].name}: {metric} {cell(trials[n].value)}, {_of(trials[n])}"),
            hoverinfo="text",
        )
        for n in numbers
    ]
    hidden = {"visible": False, "fixedrange": True}
    layout = {
        "template": None,
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
    return Panel(
        f"Parameters and {metric}",
        go.Figure(lines, layout),
        "One line for each trial, the strongest colour for the best.",
        wide=True,
        min_width=_WIDTH * (len(axes) + 1),
    )


def _notes(n: int, axis: _Axis) -> list[dict[str, Any]]:
    """The axis's name above it, and its ticks to its left."""
    name = {"x": n, "y": 1.1, "text": f"<b>{html.escape(_short(axis.name))}</b>", "showarrow": False}
    beside = {"xanchor": "right", "xshift": -5, "showarrow": False}
    ticks = [{"x": n, "y": at, "text": html.escape(_short(text)), **beside} for at, text in axis.ticks]
    return [name, *ticks]


def _short(text: str) -> str:
    """Text shortened to fit between two axes; the table has the full text."""
    return text if len(text) <= _ROOM else f"{text[: _ROOM - 1]}…"


def _places(values: Sequence[float]) -> list[float]:
    """The quantile of each value, 0 for the worst and 1 for the best: outliers do not wash out the
    colours."""
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
    kinds = sorted({cell(value) for value in column}, key=lambda text: (len(text), text))
    if not all(is_number(value) for value in column) or len(kinds) <= 4:
        last = max(1, len(kinds) - 1)
        heights = [kinds.index(cell(value)) / last for value in column]
        return _Axis(name, heights, [(n / last, kind) for n, kind in enumerate(kinds)])
    numbers = [float(value) for value in column]
    if min(numbers) > 0 and max(numbers) / min(numbers) > 30:
        return _scaled(name, [math.log10(number) for number in numbers], lambda height: f"{10**height:.3g}")
    return _scaled(name, numbers, lambda height: f"{height:.3g}")


def _scaled(name: str, numbers: Sequence[float], text: Callable[[float], str]) -> _Axis:
    low, high = min(numbers), max(numbers)
    width = high - low or 1.0
    ticks = [(n / 4, text(low + width * n / 4)) for n in range(5)]
    return _Axis(name, [(number - low) / width for number in numbers], ticks)


def _table(trials: Sequence[Trial], best: Trial, metric: str) -> Html:
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    rows = []
    for trial in trials:
        epochs = sum("epoch" in report for report in trial.reports)
        state = trial.status if trial.error is None else f"{trial.status}: {trial.error[:80]}"
        cells = [trial.name, cell(trial.value), *(cell(trial.parameters.get(name)) for name in names)]
        cells += [state, str(epochs), f"{trial.seconds:.1f}"]
        rows.append(cells)
    standing_out = [trial.name for trial in trials].index(best.name)
    return table(["trial", metric, *names, "status", "epochs", "seconds"], rows, best=standing_out)


def _of(trial: Trial) -> str:
    return ", ".join(f"{name} {cell(value)}" for name, value in trial.parameters.items())
