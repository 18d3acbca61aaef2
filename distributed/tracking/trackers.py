"""Trackers on rank 0: fed at log steps through a file of the run, dropped when they fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

from distributed.config import DistributedConfig, explain
from distributed.config.script_overlay import active
from distributed.interfaces.backend import Backend
from distributed.interfaces.history import History
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Progress
from distributed.interfaces.tracker import Place, Tracker, TrackerSpec
from distributed.redaction import redact
from distributed.registry.catalog import Catalog, load_target, require
from distributed.tracking.delivery import Delivery, Outbox

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
    """The context of each enabled tracker in the caller's process, by tracker name, and what the
    command or trial that runs this script adds.

    Call it in the process that called `fit`; the result is picklable as far as the trackers
    keep to plain values, and is an argument of `Trackers` on rank 0.
    """
    contexts = {}
    for spec in enabled_trackers(config, catalog):
        captured = _attempt(spec.name, "capture", _capture, spec)
        if captured:
            contexts[spec.name] = captured
    script = active()
    for name, context in (script.tracker_contexts if script else {}).items():
        contexts[name] = {**contexts.get(name, {}), **context}
    return contexts


class Trackers:
    """The trackers of a run. On ranks other than 0 there are none.

    Args:
        catalog: where the trackers are registered.
        contexts: tracker name -> what its `capture` returned in the caller's process.
    """

    def __init__(
        self,
        config: DistributedConfig,
        world: World,
        catalog: Catalog,
        contexts: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.config, self.world, self.catalog, self.contexts = config, world, catalog, contexts
        self._started: dict[str, Tracker] = {}
        self._outbox: Outbox | None = None
        self._deliveries: list[Delivery] = []

    def start(self, params: Mapping[str, Any], place: Place | None = None, training: str = "") -> None:
        """Start the trackers that the configuration asks for.

        Args:
            params: what the configuration alone does not contain, such as the batch identity
                (C1). Recorded beside every configuration value that is not None, and wins
                over one of the same name.
            place: where the run is and begins.
            training: identifies the training over restarts, resumed runs and further fits.

        Raises:
            UserError: a tracker was asked for whose requirements are not installed.
        """
        if self.world.rank != 0:
            return
        check_trackers(self.config, self.catalog)
        everything = {name: value for name, value, _ in explain(self.config)} | dict(params)
        recorded = {name: _scalar(value) for name, value in redact(everything).items() if value is not None}
        enabled, contexts = enabled_trackers(self.config, self.catalog), self.contexts or {}
        for spec in (spec for spec in enabled if not spec.beside):
            tracker = start_tracker(spec, self.config, contexts.get(spec.name, {}), recorded, place)
            if tracker is not None:
                self._started[spec.name] = tracker
        beside = [spec for spec in enabled if spec.beside]
        if beside:
            names = ", ".join(spec.name for spec in beside)
            _attempt(names, "start", self._begin, beside, recorded, place, training)

    def _begin(
        self, specs: Sequence[TrackerSpec], params: Mapping[str, Any], place: Place | None, training: str
    ) -> None:
        """Begin to deliver to the trackers that run beside the loop."""
        training = training or token_hex(16)
        outbox = Outbox(self.config.record_dir, training)
        for spec in specs:
            made = _attempt(spec.name, "start", self._delivery, outbox.path, spec, training)
            self._deliveries += filter(None, [made])
        kept = {d.spec.name: {**d.context, "params": d.params, **d.first.kept()} for d in self._deliveries}
        fields = {name: value for name, value, origin in explain(self.config) if origin != "default"}
        more = {"training": training, "place": asdict(place or Place()), "config": fields, "contexts": kept}
        outbox.append("start", params, **more)
        self._outbox = outbox
        for delivery in self._deliveries:
            delivery.begin()

    def _delivery(self, path: Path, spec: TrackerSpec, training: str) -> Delivery:
        context = (self.contexts or {}).get(spec.name, {})
        return Delivery(path, spec, lambda: load_target(spec.target)(self.config), training, context)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` at optimizer step `step`."""
        self._each("log_metrics", _without_step(metrics), step)

    def log_epoch(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of an epoch that ended at optimizer step `step`."""
        self._each("log_epoch", _without_step(metrics), step)

    def log_checkpoint(self, path: str, step: int) -> None:
        """Record that the state after optimizer step `step` is saved at `path`."""
        self._each("log_checkpoint", path, step)

    def log_artifact(self, path: str) -> None:
        """Record the file or folder `path`, which has to stay until then."""
        self._each("log_artifact", path)

    def log_history(self, history: History) -> None:
        """Record the whole history of the run as a file, for trackers beside the loop."""
        self._append("log_text", "history.json", json.dumps(history.to_dict(), indent=1))

    def close(self, status: str) -> None:
        """Let every tracker end: `status` is ``finished``, ``stopped`` or ``failed``. May be repeated."""
        self._each("finish", status)
        self._started, self._outbox = {}, None

    def finish(self, status: str) -> None:
        """`close`, unless that was done, and wait for the trackers, each within its limit."""
        self.close(status)
        for delivery in self._deliveries:
            delivery.close()
        for delivery in self._deliveries:
            delivery.end()
        self._deliveries = []

    def _each(self, method: str, *args: Any) -> None:
        """Call `method` of every tracker in the loop, of which one that raises is dropped; note it for
        the others."""
        from distributed.checkpoint.random_state import same_streams  # imports torch

        with same_streams() if self._started else nullcontext():
            for name, tracker in list(self._started.items()):
                if _attempt(name, method, getattr(tracker, method), *args, failed=FAILED) is FAILED:
                    del self._started[name]
        self._append(method, *args)

    def _append(self, method: str, *args: Any) -> None:
        if self._outbox is None:
            return
        try:
            self._outbox.append(method, *args)
        except OSError as error:
            names = ", ".join(delivery.spec.name for delivery in self._deliveries)
            logger.warning("the trackers (%s) get no further records: %s", names, error)
            self._outbox = None
        for delivery in self._deliveries:
            delivery.watch()


def run_position(
    plan: RunPlan, backend: Backend, progress: Progress, total_steps: int | None, checkpoint: str | None
) -> Place:
    """Where the run is and begins. Collective on several nodes."""
    world = backend.world
    hosts = [world.host] if plan.num_nodes == 1 else backend.gather_objects(world.host)
    return Place(
        backend=plan.spec.name,
        world_size=world.size,
        num_nodes=plan.num_nodes,
        hosts=tuple(dict.fromkeys(hosts)),
        device=world.device,
        precision=plan.precision,
        batch=plan.batch.as_dict(),
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        total_steps=total_steps,
        checkpoint=checkpoint,
    )


def start_tracker(
    spec: TrackerSpec,
    config: DistributedConfig,
    context: Mapping[str, Any],
    params: Mapping[str, Any],
    place: Place | None = None,
) -> Tracker | None:
    """The tracker, started; None and one warning when it fails."""
    made: Tracker | None = _attempt(spec.name, "start", _started, spec, config, dict(context), place, params)
    return made


def _started(
    spec: TrackerSpec,
    config: DistributedConfig,
    context: dict[str, Any],
    place: Place | None,
    params: Mapping[str, Any],
) -> Tracker:
    tracker: Tracker = load_target(spec.target)(config)
    # A trial has parameters that its trainer's configuration does not contain.
    more = context.pop("params", {})
    tracker.context, tracker.place = context, place or Place()
    tracker.start(redact({**params, **more}))
    return tracker


def _capture(spec: TrackerSpec) -> dict[str, Any]:
    return dict(load_target(spec.target).capture())


def _attempt(name: str, method: str, call: Callable[..., Any], *args: Any, failed: Any = None) -> Any:
    """`call(*args)`, or `failed` and one warning when it raises."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        what = f"{type(error).__name__}: {error}"
        logger.warning("tracker '%s' failed in %s and is dropped; training continues. %s", name, method, what)
        return failed


def _without_step(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the record's own "step", which trackers get as an argument."""
    return {name: value for name, value in metrics.items() if name != "step"}


def _scalar(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
