"""Tracker: where a run's parameters, metrics and files are written. Lives on rank 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.config import DistributedConfig

__all__ = ["LOCAL_LIMIT", "Place", "Tracker", "TrackerSpec", "with_common_names"]


LOCAL_LIMIT = 60.0
"""Seconds that the end of a run waits for a store on this machine, which no network delays."""


def with_common_names(metrics: Mapping[str, float], config: DistributedConfig) -> dict[str, float]:
    """`metrics`, and the rate of a log step also as ``throughput``; with
    ``tracking.baseline_throughput`` its ratio to that as ``speedup``."""
    found, rate = dict(metrics), metrics.get("samples_per_second")
    if rate is None:
        return found
    found["throughput"] = rate
    baseline = config.tracking.baseline_throughput
    return found if baseline is None else {**found, "speedup": rate / baseline}


@dataclass(frozen=True)
class Place:
    """Where a run's ranks are, and where in the training they begin.

    Attributes:
        backend: its name.
        world_size: ranks over all nodes.
        num_nodes: nodes.
        hosts: their names, rank 0's first.
        device: where rank 0 computes, e.g. ``cpu`` or ``cuda:0``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        batch: the batch identity (C1).
        step: optimizer steps taken before.
        epoch: epochs complete before.
        samples: of this epoch, trained on before.
        total_steps: step at which this run ends, None when unknown.
        checkpoint: path of the checkpoint from which the run resumes; None without one.
    """

    backend: str = ""
    world_size: int = 1
    num_nodes: int = 1
    hosts: tuple[str, ...] = ()
    device: str = "cpu"
    precision: str = "fp32"
    batch: Mapping[str, int] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    samples: int = 0
    total_steps: int | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class TrackerSpec:
    """What a plugin registers: enough to choose a tracker without importing it.

    Attributes:
        name: for messages.
        target: ``package.module:Class``; called with the config alone.
        enabled: whether a config asks for this tracker.
        requires: module names that must be importable.
        install_hint: the command that installs them.
        beside: whether it runs in a thread beside the loop, which never waits for it; otherwise each of its
            methods is called in the loop, and must return at once.
    """

    name: str
    target: str
    enabled: Callable[[DistributedConfig], bool]
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    beside: bool = True


class Tracker(ABC):
    """Writes one run. Any method that raises gets the tracker dropped with a warning: it
    never stops training.

    It runs in a thread beside the loop, and its queue is a file of the run. A tracker that was dropped, or
    whose process was killed, gets the rest of the file in the next run of the same training, or by
    ``track sync``. A training that is resumed, restarted or continued by another `fit` starts a tracker
    again, with what it `kept`, and repeats no step.

    Attributes:
        training: identifies the training over restarts, resumed runs and further fits; empty if unknown.
        uncertain: whether an earlier process may have written some of what comes next, and ended before
            that was noted.
        limit: seconds that the end of a run waits for it.
        moment: when the record was made that the next call is about, in seconds since the epoch; None where
            calls are not deferred.
        context: state of the caller at the start of the run (e.g. the id of an active MLflow
            run), as returned by `capture` in the caller's process.
        place: where the run is and where it begins; known from `start` on.
    """

    context: dict[str, Any]
    place: Place = Place()
    training: str = ""
    uncertain: bool = False
    limit: float = 6.0
    moment: float | None = None

    @classmethod
    def capture(cls) -> dict[str, Any]:
        """Called in the caller's process before ranks start; must be cheap and import
        nothing that is not already imported."""
        return {}

    def child_context(self) -> dict[str, Any]:
        """What a tracker is given as `context` to write a run within this one; empty when runs do not
        nest. Called after `start`."""
        return {}

    def target(self) -> str:
        """Return the place to which `context` and configuration have the run written, such as the address of
        a server. Another one than before gets the whole training. Called before `start`; must not wait for
        it."""
        return ""

    def kept(self) -> dict[str, Any]:
        """Return what becomes part of `context` where this run is continued, as plain data. Before `start`,
        that is what another process has to know besides the configuration."""
        return {}

    def flush(self) -> None:  # noqa: B027 - optional
        """Return when what was recorded so far is where it belongs. Called twice a second at most."""

    @abstractmethod
    def start(self, params: Mapping[str, Any]) -> None:
        """Open the run and record its parameters (flat names)."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers at an optimizer step."""

    def log_epoch(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of an epoch that ended at an optimizer step; by default like any others."""
        self.log_metrics(metrics, step)

    def log_checkpoint(self, path: str, step: int) -> None:  # noqa: B027 - optional
        """Record that the state after an optimizer step is saved at `path`."""

    def log_artifact(self, path: str) -> None:  # noqa: B027 - optional
        """Record a file or folder that belongs to the run."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Close the run: `status` is ``finished``, ``stopped`` or ``failed``."""
