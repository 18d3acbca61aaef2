"""The run of a search in the trackers, whose children are its trials."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed.config import Layer, load_layers
from distributed.interfaces.tracker import Tracker
from distributed.operations.tuning.trial_record import Trial
from distributed.registry.catalog import get_catalog, load_target
from distributed.tracking.trackers import capture_contexts, check_trackers, enabled_trackers, start_tracker

logger = logging.getLogger("distributed")


class ParentRun:
    """Open a run with every tracker whose runs nest, and close it when the search is over.

    Args:
        layers: the configuration of all trials, as far as the search knows it.
        earlier: `contexts` of the same search before it was interrupted.

    Attributes:
        contexts: tracker name -> context for the trackers of trials.

    Raises:
        UserError: the requirements of a tracker are not installed.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        name: str,
        earlier: Mapping[str, dict[str, Any]],
        params: Mapping[str, Any],
    ) -> None:
        off = {"tensorboard": False, "tensorboard_dir": None, "tracking.run_name": name}
        self.config = load_layers([*layers, Layer("DistributedTuner", off)])
        self.earlier, self.params = earlier, params
        check_trackers(self.config, get_catalog())
        self.contexts: dict[str, dict[str, Any]] = {}
        self._trackers: list[Tracker] = []

    def __enter__(self) -> ParentRun:
        catalog = get_catalog()
        captured = capture_contexts(self.config, catalog)
        for spec in enabled_trackers(self.config, catalog):
            if load_target(spec.target).child_context is Tracker.child_context:
                continue  # a search is no run of its own there
            context = captured.get(spec.name, {})
            before = self.earlier.get(spec.name, {}).get("parent_run_id")
            if before:
                context = {**context, "own_run_id": before}
            tracker = start_tracker(spec, self.config, context, self.params)
            if tracker is None:
                continue
            self._trackers.append(tracker)
            child = tracker.child_context()
            if child:
                self.contexts[spec.name] = child
        return self

    def conclude(self, best: Trial, files: Sequence[Path]) -> None:
        """Record the results of the search."""
        for tracker in self._trackers:
            try:
                if best.value is not None:
                    tracker.log_metrics({f"best_{best.metric}": best.value}, 0)
                for file in files:
                    tracker.log_artifact(str(file))
            except Exception as error:  # noqa: BLE001 - a tracker never fails a run
                logger.warning("a tracker could not record the search: %s: %s", type(error).__name__, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished" if kind is None else "failed" if issubclass(kind, Exception) else "stopped"
        for tracker in self._trackers:
            try:
                tracker.finish(status)
            except Exception as failure:  # noqa: BLE001 - as above
                logger.warning("a tracker could not end: %s: %s", type(failure).__name__, failure)
