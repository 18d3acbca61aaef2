"""TrackingMixin: experiment tracking for a training loop."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.tracking.trackers import Trackers


class TrackingMixin:
    """Holds the run's `Trackers` as `trackers`. On ranks other than 0 nothing happens."""

    trackers: Trackers

    def track_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` at optimizer step `step`."""
        self.trackers.log_metrics(metrics, step)

    def track_artifact(self, path: str) -> None:
        """Record the file or folder `path`."""
        self.trackers.log_artifact(path)
