"""``bench scaling``: throughput by the number of ranks, with the spread of the repeats; and the other
actions of ``bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.commands import bench_comm, bench_pipeline
from distributed.commands.parser import add_set, positive_int
from distributed.commands.tables import print_json, print_table
from distributed.errors import UserError
from distributed.operations.report.formats import plural

if TYPE_CHECKING:
    from distributed.operations.bench.scaling import Figure, Plan, Result
    from distributed.operations.report.html import Panel

_HEADS = ["backend", "scaling", "ranks", "batch/rank", "samples/s", "min to max", "efficiency", "min to max"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``bench`` and their flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    summary = "Measure throughput and efficiency for several numbers of ranks (strong and weak scaling)."
    scaling = actions.add_parser("scaling", help=summary, description=summary)
    flags = scaling.add_argument
    flags(
        "--backends", default="pytorch-ddp", metavar="A,B", help="Backends to measure. Default: pytorch-ddp."
    )
    flags(
        "--ranks",
        default="1,2",
        metavar="N,N",
        help="Numbers of ranks. Default: 1,2. Efficiency is relative to the smallest.",
    )
    flags(
        "--mode",
        choices=["strong", "weak", "both"],
        default="both",
        help="strong: constant global batch size; weak: constant batch size per rank. Default: both.",
    )
    flags(
        "--batch-size",
        default="64",
        metavar="N",
        help="Samples per rank at the smallest number of ranks. Default: 64.",
    )
    flags("--steps", default="120", metavar="N", help="Optimizer steps per run. Default: 120.")
    flags("--repeats", default="3", metavar="N", help="Runs of each setting, interleaved. Default: 3.")
    flags("--width", default="256", metavar="N", help="Width of the bundled network. Default: 256.")
    flags("--depth", default="4", metavar="N", help="Hidden layers of the bundled network. Default: 4.")
    flags("--script", metavar="FILE", help="Script to train instead of the bundled network.")
    add_set(scaling, "Any configuration field, as for train. Repeatable.")
    flags("--json", action="store_true", help="Print JSON with every repeat.")
    flags("--output", metavar="FILE", help="Also write an HTML page with plots.")
    bench_comm.add_arguments(actions)
    bench_pipeline.add_arguments(actions)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UserError: a wrong argument, a backend that is not installed, or a failed run.
    """
    others = {"comm": bench_comm.run, "pipeline": bench_pipeline.run}
    if args.action in others:
        return others[args.action](args)
    from distributed.operations.bench.scaling import measure

    plan = _plan(args)
    if args.output:
        from distributed.operations.report.html import check_plotly

        check_plotly()
    remarks = _remarks(plan)
    for text in [_machine(), *remarks]:
        print(f"note: {text}", file=sys.stderr)
    results = measure(plan, report=lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        print_json(
            {"machine": _machine(), "remarks": remarks, "results": [_as_json(result) for result in results]}
        )
    else:
        print_table(_HEADS, [_row_cells(result) for result in results])
    if args.output:
        _write_page(Path(args.output), plan, results, remarks)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from distributed.commands.script import find_script
    from distributed.operations.bench.scaling import Plan, cases_of
    from distributed.registry.catalog import get_catalog, require

    backends = list(dict.fromkeys(name.strip() for name in args.backends.split(",") if name.strip()))
    for name in backends:
        spec = get_catalog().backend(name, "--backends")
        require(spec.requires, f"backend '{name}'", spec.install_hint)
    if not backends:
        raise UserError("no backend given", field="--backends", got=args.backends)
    script = None if args.script is None else find_script(args.script)
    size = [
        "--width",
        str(positive_int(args.width, "--width")),
        "--depth",
        str(positive_int(args.depth, "--depth")),
    ]
    plan = Plan(
        backends=backends,
        ranks=sorted({positive_int(word, "--ranks") for word in args.ranks.split(",")}),
        modes=["strong", "weak"] if args.mode == "both" else [args.mode],
        batch_size=positive_int(args.batch_size, "--batch-size"),
        steps=positive_int(args.steps, "--steps"),
        repeats=positive_int(args.repeats, "--repeats"),
        script=script,
        arguments=size if script is None else (),
        options=[word for assignment in args.set for word in ("--set", assignment)],
    )
    cases_of(plan)
    return plan


def _machine() -> str:
    from distributed.system.devices import visible_gpus

    gpus = visible_gpus()
    if gpus:
        return plural(gpus, "GPU")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return f"{plural(_cores(), 'core')} and no GPU, {plural(int(threads), 'thread')} a rank"


def _remarks(plan: Plan) -> list[str]:
    from distributed.system.devices import visible_gpus

    gpus, found = visible_gpus(), []
    have, what = (gpus, "GPU") if gpus else (_cores(), "core")
    if plan.ranks[-1] > have:
        found.append(
            f"{plan.ranks[-1]} ranks share {plural(have, what)}:"
            " their efficiency depends more on this machine"
            " than on the backend."
        )
    if plan.repeats < 3:
        found.append("Fewer than three repeats are not enough to estimate noise.")
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _row_cells(result: Result) -> list[str]:
    rate, share = result.throughput, result.efficiency
    return [
        result.case.backend,
        result.mode,
        str(result.case.ranks),
        str(result.case.batch_size),
        f"{rate.median:,.0f}",
        f"{rate.low:,.0f} to {rate.high:,.0f}",
        f"{share.median:.2f}",
        f"{share.low:.2f} to {share.high:.2f}",
    ]


def _as_json(result: Result) -> dict[str, Any]:
    return {
        **asdict(result.case),
        "mode": result.mode,
        "samples_per_second": _measurement(result.throughput),
        "efficiency": _measurement(result.efficiency),
    }


def _measurement(figure: Figure) -> dict[str, Any]:
    return {"median": figure.median, "min": figure.low, "max": figure.high, "repeats": list(figure.values)}


def _write_page(path: Path, plan: Plan, results: Sequence[Result], remarks: Sequence[str]) -> None:
    from distributed.operations.report import html

    what = "A network of random numbers" if plan.script is None else plan.script.name
    panels = _panels(plan, results)
    body = [
        html.Html("<h1>Scaling</h1>\n"),
        html.paragraph(
            f"{what}, {plural(plan.steps, 'step')} a run, {plural(plan.repeats, 'repeat')} in turns;"
            f" {_machine()}."
            " Points are medians, bars reach from the lowest to the highest repeat."
        ),
        *map(html.note, remarks),
        html.plots(panels),
        html.section("Figures", html.table(_HEADS, [_row_cells(r) for r in results], numbers=range(2, 8))),
    ]
    html.write(path, html.page("Scaling", body, panels))
    print(path)


def _panels(plan: Plan, results: Sequence[Result]) -> list[Panel]:
    from distributed.operations.report.figures import line_panel
    from distributed.operations.report.runs import Series

    rates: list[tuple[str, Series, dict[str, object]]] = []
    shares: list[tuple[str, Series, dict[str, object]]] = []
    for index, backend in enumerate(plan.backends):
        for mode in plan.modes:
            own = [result for result in results if (result.case.backend, result.mode) == (backend, mode)]
            ranks = [result.case.ranks for result in own]
            dash = "solid" if mode == "strong" or len(plan.modes) == 1 else "dot"
            for lines, figures, scale in (
                (rates, [result.throughput for result in own], 1.0),
                (shares, [result.efficiency for result in own], 100.0),
            ):
                options = {
                    "color": index,
                    "points": True,
                    "dash": dash,
                    "low": [scale * (figure.median - figure.low) for figure in figures],
                    "high": [scale * (figure.high - figure.median) for figure in figures],
                }
                series = Series(ranks, [scale * figure.median for figure in figures])
                lines.append((f"{backend}, {mode}", series, options))
    ticks = list(plan.ranks)
    return [
        line_panel("Throughput", rates, unit="samples/s", x="ranks", ticks=ticks),
        line_panel("Efficiency", shares, unit="%", x="ranks", ticks=ticks),
    ]
