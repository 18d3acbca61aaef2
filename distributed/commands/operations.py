"""The verbs around a run, registered as every plugin registers its own."""

from __future__ import annotations

import argparse
from typing import Any

from distributed.commands import Verb, add_verbs
from distributed.registry.hookspecs import hookimpl

__all__ = ["OPERATIONS", "register_commands"]

OPERATIONS = (
    Verb(
        "tune", "distributed.commands.tune", "Search for the best hyperparameters of a script or the example."
    ),
    Verb("plan", "distributed.commands.plan", "Predict memory and step time, and choose the fastest split."),
    Verb("deploy", "distributed.commands.deploy", "Write the files that run the training on a cluster."),
    Verb("bench", "distributed.commands.bench", "Measure how throughput grows with the number of ranks."),
    Verb(
        "calibrate",
        "distributed.commands.calibrate",
        "Measure a hardware profile of this machine for predictions.",
    ),
    Verb("track", "distributed.commands.track", "Deliver to trackers what they did not get in a run."),
    Verb(
        "report",
        "distributed.commands.report",
        "Write an HTML page about one run, or a comparison of several.",
    ),
)


@hookimpl
def register_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``tune``, ``plan``, ``deploy``, ``bench``, ``calibrate``, ``track`` and ``report``."""
    add_verbs(subparsers, OPERATIONS)
