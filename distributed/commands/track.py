"""``track sync``: deliver what the trackers of a run did not get."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.commands.parser import add_set
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.training.delivery import Delivery


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``track`` and their flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    summary = "Deliver to the trackers of a run, once, what they did not get while it ran."
    sync = actions.add_parser("sync", help=summary, description=summary)
    sync.add_argument(
        "folder", metavar="RUN_FOLDER", help="checkpoint_dir or tracking.record_dir of the run, or its file."
    )
    add_set(
        sync,
        "Change a field of the run, such as tracking.mlflow_tracking_uri: another server gets the whole"
        " training.",
    )


def run(args: argparse.Namespace) -> int:
    """Deliver; exit code 1 when a tracker fails, after which the command can be repeated.

    Raises:
        UserError: no such run, or it is being recorded.
    """
    from distributed.training.delivery import outboxes

    files = outboxes(Path(args.folder))
    if not files:
        raise UserError(
            "no run with trackers has left a record here",
            field="RUN_FOLDER",
            got=args.folder,
            allowed="a folder with tracking-*.jsonl: a run's checkpoint_dir or tracking.record_dir",
        )
    return max([_sync(file, args.set) for file in files])


def _sync(file: Path, changes: list[str]) -> int:
    failed = 0
    for delivery in _deliveries(file, changes):
        name = f"{file.name}: {delivery.spec.name}"
        try:
            delivery.run()
        except BlockingIOError:
            raise UserError(
                "another process delivers the records of this run",
                field="RUN_FOLDER",
                got=str(file),
                remedy="Wait until the run has ended",
            ) from None
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            print(f"{name}: {delivery.delivered} records delivered, then {type(error).__name__}: {error}")
            failed = 1
            continue
        print(f"{name}: {delivery.delivered} records delivered to {delivery.target or 'the tracker'}")
    return failed


def _deliveries(file: Path, changes: list[str]) -> list[Delivery]:
    from distributed.config import Layer, load_layers
    from distributed.config.load import parse_assignments
    from distributed.redaction import is_redacted
    from distributed.registry.catalog import get_catalog, load_target
    from distributed.system.json_lines import read_lines
    from distributed.training.delivery import Delivery

    starts = [line for _, line in read_lines(file) if line.get("call") == "start"]
    start: dict[str, Any] = starts[-1] if starts else {"config": {}, "contexts": {}, "training": ""}
    fields, given = start["config"], parse_assignments(changes)
    if is_redacted([*fields.values(), *start["contexts"].values()]) and not given:
        raise UserError(
            "the address has a password, which files of a run leave out",
            field="--set",
            remedy="Give it again, e.g. --set tracking.mlflow_tracking_uri=...",
        )
    fields = {name: value for name, value in fields.items() if not is_redacted(value)}
    config = load_layers([Layer("recorded", fields), Layer("--set", given)])
    return [
        Delivery(
            file,
            spec,
            lambda spec=spec: load_target(spec.target)(config),  # type: ignore[misc]
            start["training"],
            {**start["contexts"][spec.name], "later": True},
        )
        for spec in get_catalog().trackers
        if spec.name in start["contexts"]
    ]
