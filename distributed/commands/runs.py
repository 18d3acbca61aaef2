"""``runs``: a table of the runs recorded below a folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.commands.tables import print_json, print_table
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.operations.report.runs import Run

_STYLES = {"failed": "red", "interrupted": "yellow", "stopped": "yellow", "running": "blue"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``runs``."""
    parser.add_argument(
        "folder",
        nargs="?",
        default=".",
        metavar="DIR",
        help="Folder to search. Default: the current directory.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")


def run(args: argparse.Namespace) -> int:
    """List the runs, newest first; an unreadable record is a row with its error.

    Raises:
        UserError: no such folder.
    """
    from distributed.operations.report.stitch import find_runs, read_runs

    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError("no such directory", field="DIR", got=args.folder)
    rows: list[dict[str, Any]] = []
    for path in find_runs(folder):
        shown = os.path.relpath(path, folder)
        try:
            rows += [_row(shown, one) for one in read_runs(path)]
        except UserError as error:
            rows.append({"path": shown, "started": 0.0, "status": "unreadable", "problem": error.message})
    rows.sort(key=lambda row: -row["started"])
    if args.json:
        print_json(rows)
    elif not rows:
        print(f"no run record found below {folder}")
    else:
        heads = ["path", "began", "backend", "ranks", "status", "epoch", "step", "best", "remark"]
        print_table(heads, [_cells(row) for row in rows], [_STYLES.get(row["status"], "") for row in rows])
    return 0


def _row(path: str, one: Run) -> dict[str, Any]:
    best = one.best()
    return {
        "path": path,
        "started": one.started,
        "last_seen": one.last_seen,
        "backend": one.place.get("backend"),
        "ranks": one.place.get("world_size"),
        "status": one.status,
        "epoch": len(one.epochs),
        "step": one.steps,
        "best_metric": best[0] if best else None,
        "best": best[1] if best else None,
        "attempts": len(one.attempts),
        "reason": one.reason,
        "problem": " ".join(one.notes),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    from distributed.operations.report.formats import cell, moment, with_unit

    best = (
        f"{row['best_metric']} {with_unit(row['best_metric'], row['best'])}" if row.get("best_metric") else ""
    )
    again = f"started {row['attempts']} times" if row.get("attempts", 1) > 1 else ""
    remark = "; ".join(filter(None, [row.get("reason"), again, row.get("problem")]))
    return [
        row["path"],
        moment(row["started"]),
        *[cell(row.get(name)) for name in ("backend", "ranks", "status", "epoch", "step")],
        best,
        remark,
    ]
