"""One module per verb: `add_arguments(parser)` and `run(args) -> exit code`, cheap to import.

`VERBS` are those without which the program could not report its own plugins; `operations` registers the
others as every plugin does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    _Action = argparse._SubParsersAction[Any]
else:  # generic for type checkers only
    _Action = argparse._SubParsersAction

__all__ = ["VERBS", "Subparsers", "Verb", "add_verbs"]


class Verb(NamedTuple):
    """One verb of the command line.

    Attributes:
        name: the word a user types.
        module: where its `add_arguments` and `run` live; imported when the verb is asked for.
        summary: one line for ``--help``.
    """

    name: str
    module: str
    summary: str


VERBS = (
    Verb("train", "distributed.commands.train", "Train a script's model, or the bundled example."),
    Verb(
        "backends", "distributed.commands.backends", "List backends, their capabilities and missing packages."
    ),
    Verb("checkpoint", "distributed.commands.checkpoint", "List, show, verify, export or prune checkpoints."),
    Verb("config", "distributed.commands.config", "Explain, list or show configuration values."),
    Verb(
        "parity",
        "distributed.commands.parity",
        "Train on two backends and report the first divergence.",
    ),
    Verb(
        "preflight",
        "distributed.commands.preflight",
        "Test the hosts of a run and their network before it starts.",
    ),
    Verb("runs", "distributed.commands.runs", "List the runs below a folder: status, progress, best metric."),
    Verb("doctor", "distributed.commands.doctor", "Check this machine and installation for known problems."),
)


class Subparsers(_Action):
    """The verbs of one command line; only the one that is asked for gets its flags."""

    asked: str | None = None


def add_verbs(subparsers: argparse._SubParsersAction[Any], verbs: Iterable[Verb]) -> None:
    """Add `verbs`, with the flags of the one that is asked for, whose module is imported."""
    for verb in verbs:
        parser = subparsers.add_parser(verb.name, help=verb.summary, description=verb.summary)
        if verb.name == getattr(subparsers, "asked", None):
            module = import_module(verb.module)
            parser.set_defaults(run=module.run)
            module.add_arguments(parser)
