"""One module per verb: `add_arguments(parser)` and `run(args) -> exit code`, cheap to import."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["VERBS", "Verb"]


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
        "tune", "distributed.commands.tune", "Search for the best hyperparameters of a script or the example."
    ),
    Verb("backends", "distributed.commands.backends", "List backends, what they can do and what they miss."),
    Verb("checkpoint", "distributed.commands.checkpoint", "List, show, verify, export or prune checkpoints."),
    Verb("config", "distributed.commands.config", "Explain, list or show configuration values."),
    Verb("deploy", "distributed.commands.deploy", "Write the files with which a cluster runs it."),
    Verb("parity", "distributed.commands.parity", "Train two backends alike and name the first divergence."),
    Verb(
        "preflight",
        "distributed.commands.preflight",
        "Let the hosts of a run test each other before it starts.",
    ),
    Verb("bench", "distributed.commands.bench", "Measure how throughput grows with the number of ranks."),
    Verb("report", "distributed.commands.report", "Write an HTML page about a run, or several compared."),
    Verb("runs", "distributed.commands.runs", "List the runs below a folder: status, progress, best figure."),
    Verb("doctor", "distributed.commands.doctor", "Check this machine and installation for known trouble."),
)
