"""``report``: an HTML page about one run, or comparing several."""

from __future__ import annotations

import argparse
from pathlib import Path

from distributed.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``report``."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="Folder of a run: its checkpoint_dir or tracking.record_dir. Several runs are compared.",
    )
    parser.add_argument(
        "--output", metavar="FILE", default="report.html", help="Output file. Default: report.html."
    )
    parser.add_argument("--title", metavar="TEXT", help="Heading of the page. Default: the name of the run.")
    parser.add_argument("--all", action="store_true", help="Include earlier runs in the same folder.")


def run(args: argparse.Namespace) -> int:
    """Read the records and write the page.

    Raises:
        UserError: no record there, one that cannot be read, or plotly is not installed.
    """
    from distributed.operations.report.html import check_plotly, write
    from distributed.operations.report.stitch import read_runs

    check_plotly()
    from distributed.operations.report.page import report

    output = Path(args.output)
    if output.is_dir():
        raise UserError("is a directory", field="--output", got=args.output, allowed="an HTML file")
    found = []
    for path in dict.fromkeys(args.runs):
        runs = read_runs(Path(path))
        left = len(runs) - 1
        if left and not args.all:
            runs[-1].notes.append(
                f"The folder holds {left} earlier run{'s' if left > 1 else ''}, which --all shows as well."
            )
        found += runs if args.all else runs[-1:]
    write(output, report(found, args.title))
    for one in found:
        for text in one.notes:
            print(f"{one.folder}: {text}")
    print(f"{output}  {output.stat().st_size / 1e6:.1f} MB, {len(found)} run{'s' if len(found) > 1 else ''}")
    return 0
