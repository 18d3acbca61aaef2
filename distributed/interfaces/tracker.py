"""Tracker: where a run's parameters, metrics and files are written. Lives on rank 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.config import DistributedConfig

__all__ = ["Tracker", "TrackerSpec"]


@dataclass(frozen=True)
class TrackerSpec:
    """What a plugin registers: enough to choose a tracker without importing it.

    Attributes:
        name: for messages.
        target: ``package.module:Class``; called with the config alone.
        enabled: whether a config asks for this tracker.
        requires: module names that must be importable.
        install_hint: the command that installs them.
    """

    name: str
    target: str
    enabled: Callable[[DistributedConfig], bool]
    requires: tuple[str, ...] = ()
    install_hint: str = ""


class Tracker(ABC):
    """Writes one run. Any method that raises gets the tracker dropped with a warning: it
    never stops training.

    Attributes:
        context: where the caller stood when it asked for the run (an active MLflow run's
            id, say), as returned by `capture` in the caller's process.
    """

    context: dict[str, Any]

    @classmethod
    def capture(cls) -> dict[str, Any]:
        """Called in the caller's process before ranks start; must be cheap and import
        nothing that is not already imported."""
        return {}

    def child_context(self) -> dict[str, Any]:
        """What a tracker is given as `context` to write a run within this one; empty when runs do not
        nest. Called after `start`."""
        return {}

    @abstractmethod
    def start(self, params: Mapping[str, Any]) -> None:
        """Open the run and record its parameters (flat names)."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers at an optimizer step."""

    def log_artifact(self, path: str) -> None:  # noqa: B027 - optional
        """Record a file or folder that belongs to the run."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Close the run: `status` is ``finished``, ``stopped`` or ``failed``."""
