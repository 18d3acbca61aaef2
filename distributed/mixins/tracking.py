"""Trackers on rank 0: started once, fed at log steps, dropped when they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from distributed.config import DistributedConfig, explain
from distributed.interfaces.backend import World
from distributed.interfaces.tracker import Tracker, TrackerSpec
from distributed.plugin_manager import Catalog, load_target, require

__all__ = ["TrackingMixin", "capture_contexts", "check_trackers", "enabled_trackers", "start_tracker"]

logger = logging.getLogger("distributed")

FAILED = object()


def enabled_trackers(config: DistributedConfig, catalog: Catalog) -> list[TrackerSpec]:
    """The trackers that `config` asks for; one whose `enabled` raises is left out with a warning."""
    return [spec for spec in catalog.trackers if _attempt(spec.name, "enabled", spec.enabled, config)]


def check_trackers(config: DistributedConfig, catalog: Catalog) -> None:
    """Check, before any process starts, that the trackers asked for can run.

    Raises:
        UserError: a requirement is not installed; holds the command that installs it.
    """
    for spec in enabled_trackers(config, catalog):
        require(spec.requires, f"tracker '{spec.name}'", spec.install_hint)


def capture_contexts(config: DistributedConfig, catalog: Catalog) -> dict[str, dict[str, Any]]:
    """What each tracker asked for wants to know of the caller's process, by tracker name.

    Call it in the process that called `fit`; the result is picklable as far as the trackers
    keep to plain values, and belongs into `TrackingMixin.tracker_contexts` on rank 0.
    """
    contexts = {}
    for spec in enabled_trackers(config, catalog):
        captured = _attempt(spec.name, "capture", _capture, spec)
        if captured:
            contexts[spec.name] = captured
    return contexts


class TrackingMixin:
    """Tracking for the training loop's per-rank class. On ranks other than 0 nothing happens.

    Attributes:
        config: the run's configuration.
        world: this rank's place.
        catalog: where the trackers are registered.
        tracker_contexts: tracker name -> what `Tracker.capture` returned in the caller's process.
    """

    config: DistributedConfig
    world: World
    catalog: Catalog
    tracker_contexts: Mapping[str, dict[str, Any]]
    _trackers: dict[str, Tracker]

    def setup_tracking(self, params: Mapping[str, Any]) -> None:
        """Start the trackers that the configuration asks for.

        Args:
            params: what the configuration alone does not know, such as the batch identity
                (C1). Recorded beside every configuration value that is not None, and wins
                over one of the same name.

        Raises:
            UserError: a tracker was asked for whose requirements are not installed.
        """
        self._trackers = {}
        if self.world.rank != 0:
            return
        check_trackers(self.config, self.catalog)
        everything = {name: value for name, value, _ in explain(self.config)} | dict(params)
        recorded = {name: _scalar(value) for name, value in everything.items() if value is not None}
        for spec in enabled_trackers(self.config, self.catalog):
            tracker = start_tracker(spec, self.config, self.tracker_contexts.get(spec.name, {}), recorded)
            if tracker is not None:
                self._trackers[spec.name] = tracker

    def track_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` at optimizer step `step` with every tracker still alive."""
        # A record's own "step" says what every tracker has as the abscissa.
        figures = {name: value for name, value in metrics.items() if name != "step"}
        self._each_tracker("log_metrics", figures, step)

    def track_artifact(self, path: str) -> None:
        """Record the file or folder `path` with every tracker still alive."""
        self._each_tracker("log_artifact", path)

    def finish_tracking(self, status: str) -> None:
        """Close every tracker: `status` is ``finished``, ``stopped`` or ``failed``. May be repeated."""
        self._each_tracker("finish", status)
        self._trackers = {}

    def _each_tracker(self, method: str, *args: Any) -> None:
        """Call `method` of every tracker; one that raises is dropped."""
        for name, tracker in list(getattr(self, "_trackers", {}).items()):
            if _attempt(name, method, getattr(tracker, method), *args, failed=FAILED) is FAILED:
                del self._trackers[name]


def start_tracker(
    spec: TrackerSpec, config: DistributedConfig, context: Mapping[str, Any], params: Mapping[str, Any]
) -> Tracker | None:
    """The tracker, started; None and one warning when it fails."""
    return _attempt(spec.name, "start", _started, spec, config, dict(context), params)  # type: ignore[no-any-return]


def _started(
    spec: TrackerSpec, config: DistributedConfig, context: dict[str, Any], params: Mapping[str, Any]
) -> Tracker:
    tracker: Tracker = load_target(spec.target)(config)
    # A trial's parameters are more than its trainer's configuration knows.
    more = context.pop("params", {})
    tracker.context = context
    tracker.start({**params, **more})
    return tracker


def _capture(spec: TrackerSpec) -> dict[str, Any]:
    return dict(load_target(spec.target).capture())


def _attempt(name: str, method: str, call: Callable[..., Any], *args: Any, failed: Any = None) -> Any:
    """`call(*args)`, or `failed` and one warning when it raises."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
        what = f"{type(error).__name__}: {error}"
        logger.warning("tracker '%s' failed in %s and is dropped; training goes on. %s", name, method, what)
        return failed


def _scalar(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
