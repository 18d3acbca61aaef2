"""Command-line overrides for the script that runs: configuration layers and --dry-run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distributed.config.load import Layer
from distributed.config.schema import DistributedConfig


class ScriptRun:
    """One script under ``train --script``, or one trial of a search.

    Attributes:
        layers: configuration from the command line, strongest last.
        dry_run: print the plan instead of running it.
        num_fits: how often the script called `fit`.
        examine: called by `fit` with the trainer, its configuration, its task and the training data, instead
            of training; the script ends there.
        sampled: names of the fields that a search has set.
        tracker_contexts: tracker name -> context that is added to what it captures.
    """

    def __init__(self, layers: Sequence[Layer], dry_run: bool = False) -> None:
        self.sampled: frozenset[str] = frozenset()
        self.layers, self.dry_run, self.num_fits = list(layers), dry_run, 0
        self.examine: Callable[[Any, DistributedConfig, Any, Any], None] | None = None
        self.tracker_contexts: Mapping[str, dict[str, Any]] = {}

    def complete(self, config: DistributedConfig) -> DistributedConfig:
        """`config`, the script's with `layers` over it, as it is to be used."""
        return config


_ACTIVE: ScriptRun | None = None


def active() -> ScriptRun | None:
    """The script run under way, None outside of the command line."""
    return _ACTIVE


@contextmanager
def command_line(run: ScriptRun) -> Iterator[ScriptRun]:
    """Make `run` the active one."""
    global _ACTIVE
    before, _ACTIVE = _ACTIVE, run
    try:
        yield run
    finally:
        _ACTIVE = before
