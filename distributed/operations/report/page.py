"""Content of a report about one run, or comparing several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from distributed.operations.planning.plan_history import comparisons_of, error_text, quantity
from distributed.operations.report import html
from distributed.operations.report.compare import Scaling, differences, names_of, scalings
from distributed.operations.report.figures import line_panel, panels_of
from distributed.operations.report.formats import (
    label_of,
    moment,
    number,
    plural,
    seconds,
    setting,
    with_unit,
)
from distributed.operations.report.html import Html, Panel
from distributed.operations.report.runs import Failure, Run, Series
from distributed.operations.report.time_shares import whole

_ENDED = {
    "finished": "finished",
    "stopped": "was stopped",
    "failed": "failed",
    "interrupted": "was cut off",
    "running": "is running; so far:",
}


def report(runs: Sequence[Run], title: str | None = None) -> str:
    """The page about `runs`."""
    names = names_of(runs)
    if len(runs) == 1:
        body, panels = _alone(runs[0], title or names[0])
    else:
        body, panels = _together(runs, names, title or f"{len(runs)} runs")
    return html.page(title or " and ".join(names[:3]) + (" ..." if len(names) > 3 else ""), body, panels)


# -- one run -----------------------------------------------------------------------------------


def _alone(run: Run, title: str) -> tuple[list[Html], list[Panel]]:
    panels = panels_of([run], [run.name])
    badge = f'<span class="badge {escape(run.status)}">{escape(run.status)}</span>'
    body = [
        Html(f"<h1>{escape(title)} {badge}</h1>\n<p class=lead>{escape(_sentence(run))}</p>\n"),
        html.facts(_facts(run)),
        *map(html.note, run.notes),
        html.section("Curves", html.plots(panels, key=_key(run))),
        html.section("Predicted and measured", _predicted(run)),
        html.section("Failures and restarts", *map(_event, run.failures)),
        html.section("Attempts", _attempts(run)),
        html.section("Configuration", *_config(run)),
        html.section("Environment", _environment([run], [run.name])),
    ]
    return body, panels


def _sentence(run: Run) -> str:
    """Summary of the run: script, hosts, result."""
    place, end = run.place, _ENDED.get(run.status, run.status)
    what = str(run.head.get("script") or "The run")
    ranks = int(place.get("world_size") or 0)
    where = f" under {place['backend']}" if place.get("backend") else ""
    if ranks:
        where += f" on {plural(ranks, 'rank')}" + (
            f" of {place['num_nodes']} nodes" if int(place.get("num_nodes") or 1) > 1 else ""
        )
        where += (
            f" ({', '.join(filter(None, [_device(run), *_hosts(run)[:3]]))}, {place.get('precision', '')})"
        )
    batch = (place.get("batch") or {}).get("global_batch_size")
    where += f", global batch {batch}" if batch else ""
    done = f"{plural(run.steps, 'step')}, {plural(len(run.epochs), 'epoch')}" if run.steps else "no step"
    took = f" in {seconds(run.seconds())}" if run.seconds() else ""
    text = f"{what} {end} after {done}{took}" if run.status != "running" else f"{what} {end} {done}{took}"
    reason = f" ({run.reason})" if run.reason else ""
    restarts = len(run.attempts) - 1
    again = f"; it was restarted {'once' if restarts == 1 else f'{restarts} times'}" if restarts > 0 else ""
    best = run.best()
    result = ""
    if best is not None:
        result = f" Best {label_of(best[0]).lower()}: {with_unit(*best[:2])}, at step {best[2]:,}."
    return f"{text}{reason}{where}{again}.{result}"


def _facts(run: Run) -> list[tuple[str, str]]:
    best, rate, losses = run.best(), run.throughput(), run.series("loss").values
    found = []
    if best is not None:
        found.append((f"best {label_of(best[0]).lower()}", with_unit(*best[:2])))
    if losses:
        found.append(("last training loss", number(losses[-1])))
    if rate is not None:
        found.append(("samples/s, median", number(rate)))
    found.append(("time in training", seconds(run.seconds())))
    total = run.totals.get("total_time")
    if isinstance(total, int | float) and len(run.attempts) == 1:
        found.append(("total, including the start of the ranks", seconds(float(total))))
    peak = _peak(run)
    if peak is not None:
        found.append((peak[0], f"{number(peak[1])} MiB"))
    if len(run.attempts) > 1:
        found.append(("attempts", str(len(run.attempts))))
    skipped = run.totals.get("num_skipped_steps")
    if skipped:
        found.append(("steps skipped, gradients not finite", str(skipped)))
    return found


def _predicted(run: Run) -> Html:
    """What the plan of the run predicted; empty without a plan."""
    rows = [
        [c.what, quantity(c, c.predicted), quantity(c, c.measured), error_text(c)]
        for c in comparisons_of(run)
    ]
    if not rows:
        return Html("")
    split = html.note(f"The plan: {run.setting('planned.split')} on {run.setting('planned.hardware')}.")
    return Html(split + html.table(["", "predicted", "measured", "error"], rows, numbers=(1, 2, 3)))


def _peak(run: Run) -> tuple[str, float] | None:
    for name, text in (
        ("memory_peak_mb", "device memory, peak"),
        ("memory_rss_mb", "memory of rank 0, most"),
    ):
        values = [value for value in run.series(name).values if math.isfinite(value)]
        if values:
            return text, max(values)
    return None


def _key(run: Run) -> str:
    parts = []
    if run.resumes():
        parts.append('<span class="key"></span>training resumed from here')
    if any(failure.step is not None for failure in run.failures):
        parts.append('<span class="key failure"></span>a failure')
    return "".join(parts)


def _event(failure: Failure) -> Html:
    who = [moment(failure.time)]
    who += [f"rank {failure.rank}"] if failure.rank is not None else []
    who += [failure.host] if failure.host else []
    who += [f"step {failure.step}"] if failure.step is not None else []
    what = "The run ended" if failure.fatal else "An attempt ended, or a rank stalled"
    details = Html(f"<pre>{escape(failure.details.strip())}</pre>") if failure.details.strip() else Html("")
    return Html(
        f'<div class="event{" fatal" if failure.fatal else ""}">'
        f"<span class=quiet>{escape(' · '.join(who))}</span>"
        f"<p>{escape(failure.summary or what)}</p>"
        f"{html.unfold('Traceback and stacks', details) if details else ''}</div>\n"
    )


def _attempts(run: Run) -> Html:
    if len(run.attempts) < 2:
        return Html("")
    rows = []
    for index, attempt in enumerate(run.attempts, 1):
        place = attempt.start.get("place", {})
        source = str(
            place.get("checkpoint") or "the beginning" if attempt.step == 0 else place.get("checkpoint") or ""
        )
        rows.append(
            [
                str(index),
                moment(attempt.start.get("time", 0.0)),
                str(place.get("world_size", "")),
                ", ".join(map(str, place.get("hosts", []))),
                f"{attempt.step:,}",
                f"{attempt.last_step:,}",
                Path(source).name if "/" in source else source,
            ]
        )
    heads = ["attempt", "began", "ranks", "hosts", "from step", "to step", "resumed from"]
    return html.table(heads, rows, numbers=(2, 4, 5))


def _config(run: Run) -> list[Html]:
    if not run.config:
        return []
    heads = ["field", "value", "set by"]
    given = [item for item in run.config if item[2] != "default"]
    rest = [item for item in run.config if item[2] == "default"]
    return [
        html.table(heads, _settings(given)) if given else html.note("All fields are at their defaults."),
        html.unfold(
            f"{len(rest)} fields at their defaults", html.table(heads[:2], [r[:2] for r in _settings(rest)])
        ),
    ]


def _settings(items: Sequence[tuple[str, object, str]]) -> list[list[str]]:
    return [[name, setting(value), origin] for name, value, origin in items]


def _environment(runs: Sequence[Run], names: Sequence[str]) -> Html:
    found: list[dict[str, str]] = []
    for run in runs:
        versions = run.head.get("versions")
        cores = run.head.get("cores")
        batch = run.place.get("batch") or {}
        found.append(
            {
                "folder": str(run.folder.resolve()),
                "began": moment(run.started),
                "hosts": ", ".join(_hosts(run)),
                "device": str(run.place.get("device", "")),
                "cores that rank 0 may use": str(cores or ""),
                **{name.replace("_", " "): str(value) for name, value in batch.items()},
                **({str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}),
            }
        )
    keys = list(dict.fromkeys(key for facts in found for key in facts))
    rows = [[key, *[facts.get(key, "") for facts in found]] for key in keys]
    return html.table(["", *(names if len(runs) > 1 else ["value"])], rows)


# -- several runs ------------------------------------------------------------------------------


def _together(runs: Sequence[Run], names: Sequence[str], title: str) -> tuple[list[Html], list[Panel]]:
    scaled = scalings(runs)
    scale_panels = _scaling_panels(scaled)
    panels = [*scale_panels, *panels_of(runs, names)]
    number_of = len(scale_panels)
    body = [
        Html(f"<h1>{escape(title)}</h1>\n<p class=lead>{escape(_shared(runs))}</p>\n"),
        _overview(runs, names),
        *[html.note(f"{name}: {text}") for run, name in zip(runs, names, strict=True) for text in run.notes],
        html.section("What differs", _differing(runs, names)),
        html.section("Scaling", *([_scaling_table(scaled), html.plots(scale_panels)] if scaled else [])),
        html.section("Curves", html.plots(panels[number_of:], first=number_of)),
        html.section("Failures and restarts", *_events(runs, names)),
        html.section("Environment", html.unfold("Folders, hosts, versions", _environment(runs, names))),
    ]
    return body, panels


def _shared(runs: Sequence[Run]) -> str:
    backends = sorted({str(run.place.get("backend") or "?") for run in runs})
    ranks = sorted({int(run.place.get("world_size") or 0) for run in runs})
    ended = ", ".join(
        f"{sum(run.status == status for run in runs)} {_ENDED[status].split(' and ')[0]}"
        for status in _ENDED
        if any(run.status == status for run in runs)
    )
    return f"{len(runs)} runs under {', '.join(backends)} on {_listed(ranks)}: {ended}."


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return plural(ranks[0], "rank")
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]} ranks"


def _overview(runs: Sequence[Run], names: Sequence[str]) -> Html:
    heads = [
        "run",
        "status",
        "backend",
        "ranks",
        "batch",
        "steps",
        "best",
        "loss",
        "samples/s",
        "time",
        "save",
    ]
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        best, losses, rate, phases = run.best(), run.series("loss").values, run.throughput(), whole(run)
        share = 100 * phases.get("save", 0.0) / sum(phases.values()) if phases else None
        swatch = f'<span class=swatch style="background:var(--c{index % 8})"></span>'
        rows.append(
            [
                Html(f"{swatch}{escape(name)}"),
                Html(f'<span class="{escape(run.status)}">{escape(run.status)}</span>'),
                str(run.place.get("backend", "")),
                str(run.place.get("world_size", "")),
                str((run.place.get("batch") or {}).get("global_batch_size", "")),
                f"{run.steps:,}",
                f"{with_unit(*best[:2])} ({best[0].removeprefix('val_')})" if best else "",
                number(losses[-1]) if losses else "",
                number(rate) if rate is not None else "",
                seconds(run.seconds()),
                f"{share:.1f} %" if share is not None else "",
            ]
        )
    return html.table(heads, rows, numbers=(3, 4, 5, 6, 7, 8, 9, 10))


def _differing(runs: Sequence[Run], names: Sequence[str]) -> Html:
    rows = [[name, *values] for name, values in differences(runs)]
    if not rows:
        return Html("<p>Only file paths differ; the configuration is the same in all runs.</p>\n")
    return html.table(["setting", *names], rows)


def _events(runs: Sequence[Run], names: Sequence[str]) -> list[Html]:
    found = []
    for run, name in zip(runs, names, strict=True):
        if run.failures:
            found.append(Html(f"<h3>{escape(name)}</h3>\n"))
            found += map(_event, run.failures)
    return found


def _scaling_table(scaled: Sequence[Scaling]) -> Html:
    rows = [
        [
            item.backend,
            f"{item.kind} ({'global batch stays' if item.kind == 'strong' else 'batch per rank stays'})",
            str(ranks),
            number(rate),
            f"{100 * efficiency:.0f} %",
        ]
        for item in scaled
        for ranks, rate, efficiency in zip(item.ranks, item.throughput, item.efficiency, strict=True)
    ]
    return html.table(["backend", "scaling", "ranks", "samples/s", "efficiency"], rows, numbers=(2, 3, 4))


def _scaling_panels(scaled: Sequence[Scaling]) -> list[Panel]:
    if not scaled:
        return []
    rates = []
    shares = []
    for index, item in enumerate(scaled):
        name = f"{item.backend}, {item.kind}"
        options = {"color": index, "points": True, "dash": "solid" if item.kind == "strong" else "dot"}
        rates.append((name, Series(item.ranks, item.throughput), options))
        percent = [100 * value for value in item.efficiency]
        shares.append((name, Series(item.ranks, percent), options))
    ticks = sorted({ranks for item in scaled for ranks in item.ranks})
    note = "Relative to the fewest ranks of each."
    return [
        line_panel("Throughput by ranks", rates, unit="samples/s", x="ranks", ticks=ticks),
        line_panel("Efficiency by ranks", shares, unit="%", x="ranks", ticks=ticks, note=note),
    ]


# -- words -------------------------------------------------------------------------------------


def _hosts(run: Run) -> list[str]:
    hosts = run.place.get("hosts")
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _device(run: Run) -> str:
    return {"cpu": "CPU", "cuda": "CUDA"}.get(str(run.place.get("device", "")).partition(":")[0], "")
