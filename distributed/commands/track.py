"""``track sync``: deliver what the trackers of a run did not get."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.commands.parser import add_set
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.tracking.delivery import Delivery


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``track`` and their flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    summary = "Deliver to the trackers of a run, once, what they did not get while it ran."
    sync = actions.add_parser("sync", help=summary, description=summary)
    about = "checkpoint_dir or tracking.record_dir of the run, or one of its tracking-*.jsonl."
    sync.add_argument("folder", metavar="RUN_FOLDER", help=about)
    add_set(sync, "Change a field of the run: another tracking.mlflow_tracking_uri gets the whole training.")


def run(args: argparse.Namespace) -> int:
    """Deliver; exit code 1 when a tracker fails, after which the command can be repeated.

    Raises:
        UserError: no such run, or it is being recorded.
    """
    from distributed.config.load import parse_assignments

    path, failed = Path(args.folder), 0
    files = [path] if path.is_file() else sorted(path.glob("tracking-*.jsonl"))
    if not files:
        raise UserError(
            "no run with trackers has left a record here",
            field="RUN_FOLDER",
            got=args.folder,
            allowed="a folder with tracking-*.jsonl: a run's checkpoint_dir or tracking.record_dir",
        )
    for file in files:
        for delivery in _deliveries(file, parse_assignments(args.set)):
            failed |= _deliver(delivery)
    return failed


def _deliver(delivery: Delivery) -> int:
    problem = ""
    try:
        delivery.run()
    except BlockingIOError:
        raise UserError(
            "another process delivers the records of this run",
            field="RUN_FOLDER",
            got=str(delivery.path),
            remedy="Wait until the run has ended",
        ) from None
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        problem = f", then {type(error).__name__}: {error}"
    print(f"{delivery.path.name}: {delivery.delivered} records delivered to {delivery.title}{problem}")
    return int(bool(problem))


def _deliveries(file: Path, changes: dict[str, Any]) -> Iterator[Delivery]:
    from distributed.config import Layer, load_layers
    from distributed.redaction import is_redacted
    from distributed.registry.catalog import get_catalog, load_target
    from distributed.system.json_lines import read_lines
    from distributed.tracking.delivery import Delivery

    start: dict[str, Any] = {"config": {}, "contexts": {}, "training": ""}
    for _, line in read_lines(file):
        start = line if line.get("call") == "start" else start
    fields, contexts = start["config"], start["contexts"]
    if is_redacted([fields, contexts]) and not changes:
        raise UserError(
            "the address has a password, which the files of a run leave out",
            field="--set",
            remedy="Give it again, such as --set tracking.mlflow_tracking_uri=...",
        )
    layer = Layer("recorded", {name: value for name, value in fields.items() if not is_redacted(value)})
    config = load_layers([layer, Layer("--set", changes)])

    def make(target: str, config: DistributedConfig = config) -> Any:
        return load_target(target)(config)

    for spec in get_catalog().trackers:
        if spec.name in contexts:
            context = {**contexts[spec.name], "later": True}
            yield Delivery(file, spec, partial(make, spec.target), start["training"], context)
