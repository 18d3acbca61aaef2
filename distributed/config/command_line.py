"""Layers that the command line lays over whatever a user's script says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from distributed.config.load import Layer

__all__ = ["ScriptRun", "active", "command_line"]


class ScriptRun:
    """One script under ``train --script``.

    Attributes:
        layers: configuration from the command line, strongest last.
        dry_run: print the plan instead of running it.
        num_fits: how often the script called `fit`.
    """

    def __init__(self, layers: Sequence[Layer], dry_run: bool = False) -> None:
        self.layers, self.dry_run, self.num_fits = list(layers), dry_run, 0


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
