"""The plots of a report, as plotly figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import plotly.graph_objects as go

from distributed.operations.report.formats import label_of, unit_of
from distributed.operations.report.html import Panel
from distributed.operations.report.runs import Run, Series
from distributed.operations.report.time_shares import PHASES, over_steps, whole

__all__ = ["line_panel", "panels_of", "stacked_bars"]

_HANDLED = ("epoch", "loss", "learning_rate", "samples_per_second", "grad_norm", "gpu_utilisation")
_SEEN = frozenset({"epoch", "train_loss", "learning_rate", "val_loss"})
Lines = Sequence[tuple[str, Series, Mapping[str, Any]]]
"""(name, values, options: ``color``, ``faint``, ``points``)."""


def panels_of(runs: Sequence[Run], names: Sequence[str]) -> list[Panel]:
    """Every plot for which some run has data.

    Args:
        runs: one run, or several to overlay.
        names: names of the runs, for legends.
    """
    found = [_losses(runs, names)]
    for name in _union(run.figures("epoch") for run in runs):
        if name not in _SEEN:
            found.append(_metric(runs, names, name, "epoch"))
    found += [_metric(runs, names, name) for name in ("learning_rate", "grad_norm", "samples_per_second")]
    found += [_memory(runs, names), _metric(runs, names, "gpu_utilisation")]
    found.append(_shares(runs[0]) if len(runs) == 1 else None)
    found.append(_whole(runs, names))
    for name in _union(run.figures() for run in runs):
        if name not in _HANDLED and not name.startswith(("memory_", "time_")):
            found.append(_metric(runs, names, name))
    return _without_gaps([panel for panel in found if panel is not None])


def _without_gaps(panels: list[Panel]) -> list[Panel]:
    """Widen a panel that is alone in its row; a row has two."""
    room, filled = False, []
    for index, panel in enumerate(panels):
        last = index + 1 == len(panels) or panels[index + 1].wide
        filled.append(replace(panel, wide=True) if last and not room and not panel.wide else panel)
        room = not room and not filled[-1].wide
    return filled


def line_panel(
    title: str,
    lines: Lines,
    *,
    unit: str = "",
    x: str = "optimizer step",
    note: str = "",
    ticks: Sequence[int] = (),
) -> Panel:
    """Lines over steps (or the quantity named by `x`); `ticks` sets the marks of an axis from zero."""
    figure = go.Figure()
    for name, series, options in lines:
        few = options.get("points") or len(series.steps) < 3
        figure.add_trace(
            go.Scatter(
                x=series.steps,
                y=series.values,
                name=escape(name),
                mode="lines+markers" if few else "lines",
                line={"width": 1 if options.get("faint") else 2, "dash": options.get("dash", "solid")},
                marker={"size": 6},
                meta={"color": options.get("color", 0), "faint": bool(options.get("faint"))}
                | ({"hidden": True} if options.get("hidden") else {}),
                error_y=_spread(options),
                hovertemplate=f"%{{y:,.4~g}}{f' {unit}' if unit else ''}",
            )
        )
    _lay_out(figure, x, unit)
    if ticks:
        figure.update_xaxes(tickvals=list(ticks))
    # Around what never changes plotly would draw from one below to one above.
    if ticks or len({value for _, series, _ in lines for value in series.values}) == 1:
        figure.update_yaxes(rangemode="tozero")
    return Panel(title, figure, note)


def _spread(options: Mapping[str, Any]) -> dict[str, Any] | None:
    if "low" not in options:
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": options["high"],
        "arrayminus": options["low"],
        "thickness": 1.2,
        "width": 4,
    }


def stacked_bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    note: str = "",
    parts: Sequence[str] = PHASES,
) -> Panel:
    """A horizontal bar per row, its parts side by side.

    Args:
        rows: name -> part -> size.
        parts: names of the parts, in the order of their colours.
    """
    figure = go.Figure()
    for color, part in enumerate(parts):
        if not any(part in row for row in rows.values()):
            continue
        figure.add_trace(
            go.Bar(
                y=[escape(name) for name in rows],
                x=[row.get(part, 0.0) for row in rows.values()],
                name=part,
                orientation="h",
                meta={"color": color},
                hovertemplate=f"{part}: %{{x:.3~g}} {unit}<extra></extra>",
            )
        )
    _lay_out(figure, unit, "")
    figure.update_layout(barmode="stack", hovermode="closest", height=70 + 44 * len(rows))
    figure.update_yaxes(autorange="reversed", ticklabelstandoff=6)
    return Panel(title, figure, note, wide=True)


# -- of runs -----------------------------------------------------------------------------------


def _losses(runs: Sequence[Run], names: Sequence[str]) -> Panel | None:
    lines: list[tuple[str, Series, Mapping[str, Any]]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        alone = len(runs) == 1
        for repeated in run.repeated("loss"):
            lines.append(("repeated", repeated, {"color": index, "faint": True}))
        lines.append(("training" if alone else name, run.series("loss"), {"color": index}))
        validation: dict[str, Any] = {"color": 1 if alone else index, "points": True}
        if not alone:  # the note below explains it, which keeps the legend short
            validation |= {"dash": "dot", "hidden": True}
        lines.append(
            ("validation" if alone else f"{name}, validation", run.series("val_loss", "epoch"), validation)
        )
    lines = [line for line in lines if line[1].steps]
    if not lines:
        return None
    note = "Faint: steps that were repeated after a restart." if any(x[2].get("faint") for x in lines) else ""
    dotted = "Solid: training. Dotted: validation." if len(runs) > 1 else ""
    panel = line_panel("Loss", lines, note=" ".join(filter(None, [dotted, note])))
    return _marked(panel, runs)


def _metric(runs: Sequence[Run], names: Sequence[str], figure: str, kind: str = "log") -> Panel | None:
    unit = unit_of(figure)
    scale = 100.0 if figure.endswith("accuracy") and unit == "%" else 1.0
    lines = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        series = run.series(figure, kind)
        if series.steps:
            scaled = Series(series.steps, [scale * value for value in series.values])
            lines.append((name, scaled, {"color": index, "points": kind == "epoch"}))
    if not lines:
        return None
    panel = line_panel(label_of(figure), lines, unit=unit)
    if figure == "samples_per_second":
        panel.figure.update_yaxes(rangemode="tozero")
    return _marked(panel, runs)


def _memory(runs: Sequence[Run], names: Sequence[str]) -> Panel | None:
    lines = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        kinds = [kind for kind in run.figures() if kind.startswith("memory_")]
        if len(runs) > 1:  # the one that runs out
            kinds = [kind for kind in kinds if kind == "memory_peak_mb"] or kinds[:1]
        for offset, kind in enumerate(kinds):
            color = index if len(runs) > 1 else offset
            lines.append((name if len(runs) > 1 else label_of(kind), run.series(kind), {"color": color}))
    if not lines:
        return None
    panel = line_panel("Memory of rank 0", lines, unit="MiB")
    panel.figure.update_yaxes(rangemode="tozero")
    return _marked(panel, runs)


def _shares(run: Run) -> Panel | None:
    shares = over_steps(run)
    if not shares:
        return None
    figure = go.Figure()
    for phase, series in shares.items():
        figure.add_trace(
            go.Scatter(
                x=series.steps,
                y=series.values,
                name=phase,
                mode="lines",
                stackgroup="time",
                line={"width": 0.5},
                meta={"color": PHASES.index(phase), "fill": True},
                hovertemplate="%{y:.1f} %",
            )
        )
    _lay_out(figure, "optimizer step", "%")
    figure.update_yaxes(range=[0, 100])
    note = "Shares of rank 0's time between log steps, as its host sees it."
    return _marked(Panel("Where the time of a step goes", figure, note), [run])


def _whole(runs: Sequence[Run], names: Sequence[str]) -> Panel | None:
    rows = {name: whole(run) for run, name in zip(runs, names, strict=True)}
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return None
    note = "Rank 0's time in training. Save includes what else is done at the end of an epoch."
    return stacked_bars("Where the time of the run went", rows, "s", note)


def _marked(panel: Panel, runs: Sequence[Run]) -> Panel:
    """Mark resumes and failures; of a single run only, because marks of several cannot be distinguished."""
    if len(runs) > 1:
        return panel
    (run,) = runs
    for step in dict.fromkeys(run.resumes()):
        panel.figure.add_vline(x=step, line={"width": 1, "dash": "dash"}, name="resume")
    for failure in run.failures:
        if failure.step is not None:
            panel.figure.add_vline(x=failure.step, line={"width": 1.5, "dash": "dot"}, name="failure")
    return panel


def _lay_out(figure: go.Figure, x: str, y: str) -> None:
    figure.update_layout(
        template=None,
        height=300,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        hovermode="x unified",
        showlegend=False,  # the page has its own, which wraps on a phone
        barcornerradius=3,
    )
    figure.update_xaxes(title={"text": x, "standoff": 8}, automargin=True, zeroline=False, fixedrange=False)
    figure.update_yaxes(title={"text": y, "standoff": 8}, automargin=True, zeroline=False, tickformat=",.6~g")


def _union(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))
