"""MLflow: parameters, metrics and files of a run, in a run of its own or in the caller's.

Records are collected and written many at once, since each takes MLflow some 4 ms in a local store.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.tracker import LOCAL_LIMIT, Tracker, TrackerSpec, with_common_names
from distributed.registry.hookspecs import hookimpl
from distributed.system.random_numbers import draw_apart

__all__ = ["MLflowTracker", "register_trackers"]

logger = logging.getLogger("distributed")

METRICS_PER_BATCH = 1000  # the limits are MLflow's
PARAMS_PER_BATCH = 100
LOCAL_STORE = "sqlite:///mlflow.db"
DRAW_NUMBERS = (
    "mlflow.store.tracking.sqlalchemy_store",  # pauses before retries
    "mlflow.telemetry.client",  # whether to report usage, in a thread
    "mlflow.utils.name_utils",  # names of runs
    "mlflow.utils.request_utils",  # pauses before retries, in the thread that writes records
    "mlflow.utils.rest_utils",
    "urllib3.util.retry",
)
"""Modules that draw from Python's generator, and what for."""
VARIABLES = ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID")
TRAINING = "distributed.training"
"""Tag of a run: the training that it holds."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    """MLflow, when `mlflow_tracking` or `tracking.mlflow_experiment` asks for it."""
    return [
        TrackerSpec(
            name="mlflow",
            target="distributed_plugins.mlflow:MLflowTracker",
            enabled=lambda config: config.wants_mlflow,
            requires=("mlflow",),
            install_hint="pip install 'distributed-trainer[mlflow]'",
        )
    ]


class MLflowTracker(Tracker):
    """One MLflow run.

    The store is `tracking.mlflow_tracking_uri`, else ``MLFLOW_TRACKING_URI``, else
    ``sqlite:///mlflow.db`` with the artifacts beside it; the experiment is
    `tracking.mlflow_experiment`, else that of MLflow's own variables, else ``Default``.

    When the caller has an active run, that run is joined and left open, whatever the
    experiment; parameters that the caller has logged already are left as they are.
    Only an explicit `tracking.mlflow_tracking_uri` of another store prevents it. ``MLFLOW_RUN_ID`` names a
    run in the same way. One that holds another training already gets a child run for this one.

    With ``parent_run_id`` in its context, as `child_context` puts it there, the run is a child of that
    one; a child of the same name, which an earlier attempt left, is resumed. With ``own_run_id``, as `kept`
    puts it there, it resumes that run as its own.

    MLflow's usage telemetry is switched off unless ``MLFLOW_DISABLE_TELEMETRY`` is set. What MLflow draws,
    such as the name of a run, it does not take from the random numbers of training.

    Attributes:
        run_id: known after `start`.
    """

    run_id: str
    _uri: str
    _is_parent = False

    def __init__(self, config: DistributedConfig) -> None:
        self.config = config
        self.context = {}
        self.run_id = ""
        self._pending: list[Any] = []
        self._names: dict[str, str] = {}
        self._written: set[tuple[str, int]] = set()

    @classmethod
    def capture(cls) -> dict[str, Any]:
        """``run_id``, ``tracking_uri`` and ``experiment_id`` of the caller's active run, if any."""
        mlflow = sys.modules.get("mlflow")
        # Before the run is seeded: a thread of the caller's MLflow may draw at any time.
        draw_apart(DRAW_NUMBERS)
        run = mlflow.active_run() if mlflow is not None else None
        if mlflow is None or run is None:
            return {}
        return {
            "run_id": run.info.run_id,
            "tracking_uri": _absolute(mlflow.get_tracking_uri()),
            "experiment_id": run.info.experiment_id,
        }

    def target(self) -> str:
        """Address of the store, and the run that is joined there."""
        uri = self._tracking_uri()
        if uri.startswith(("sqlite:", "file:", "/", ".")):
            self.limit = LOCAL_LIMIT
        return f"{uri} {self._joined() or ''}".strip()

    def kept(self) -> dict[str, Any]:
        """The store, what chooses the run there, and after `start` the run itself."""
        found = {"tracking_uri": self._tracking_uri(), "variables": {n: self._variable(n) for n in VARIABLES}}
        run = {"own_run_id": self.run_id, "names": list(self._names.items())}
        return {**found, **run} if self.run_id else found

    def start(self, params: Mapping[str, Any]) -> None:
        """Join the caller's run, continue that of the training or create one, and record `params`.

        Raises:
            mlflow.exceptions.MlflowException: the store cannot be reached.
            UserError: the experiment is deleted.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        draw_apart(DRAW_NUMBERS)
        self._uri = uri = self._tracking_uri()
        self._names = dict(self.context.get("names", {}))
        with _prepared(uri):
            self._client = MlflowClient(uri)
            draw_apart(DRAW_NUMBERS)  # of the store, too, which is imported by now
            earlier = self._find_run()
            self.run_id = earlier or self._create_run(uri, self.context.get("parent_run_id"))
        self._is_new = earlier is None
        self._owned = self.run_id != self._joined() or self.run_id == self._variable("MLFLOW_RUN_ID")
        if self._owned and not self._is_new:
            self._client.update_run(self.run_id, "RUNNING")
        self._log_params(params)
        if self.uncertain:
            self._read_written()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Collect `metrics`, which `flush` writes."""
        from mlflow.entities import Metric

        now = int((self.moment or time.time()) * 1e3)
        named = with_common_names(metrics, self.config)
        self._pending += [Metric(self._key(name), float(value), now, step) for name, value in named.items()]

    def log_artifact(self, path: str) -> None:
        """Copy a file or folder to the run's artifacts."""
        self._client.log_artifact(self.run_id, path)

    def finish(self, status: str) -> None:
        """Write what is left, and end the run unless it is the caller's."""
        try:
            self.flush()
        finally:
            self._end_children()
            if self._owned:
                self._client.set_terminated(self.run_id, STATUS[status])

    def flush(self) -> None:
        """Write what was collected.

        Raises:
            Exception: MLflow's.
        """
        metrics, self._pending = self._pending, []
        metrics = [m for m in metrics if (m.key, m.step) not in self._written]
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + METRICS_PER_BATCH])

    def child_context(self) -> dict[str, Any]:
        """Context of this run, for trackers of child runs."""
        self._is_parent = True
        experiment_id = self._client.get_run(self.run_id).info.experiment_id
        return {
            "parent_run_id": self.run_id,
            "tracking_uri": self._uri,
            "experiment_id": experiment_id,
        }

    def _end_children(self) -> None:
        """Runs within this one that were killed are over, too."""
        if not self._is_parent:
            return
        for child in self._children(self.run_id, "attributes.status = 'RUNNING'"):
            self._client.set_terminated(child.info.run_id, "KILLED")

    def _find_child(self, parent: str) -> str | None:
        name = (self.config.tracking.run_name or "").replace("'", "")
        found = self._children(parent, f"attributes.run_name = '{name}'") if name else []
        return str(found[0].info.run_id) if found else None

    def _children(self, parent: str, more: str) -> list[Any]:
        where = self._client.get_run(parent).info.experiment_id
        return list(self._client.search_runs([where], f"tags.`mlflow.parentRunId` = '{parent}' and {more}"))

    def _tracking_uri(self) -> str:
        explicit = self.config.tracking.mlflow_tracking_uri
        captured = self.context.get("tracking_uri")
        return _absolute(explicit or captured or os.environ.get("MLFLOW_TRACKING_URI") or LOCAL_STORE)

    def _variable(self, name: str) -> str:
        """The environment variable, as it was where the run began."""
        return str(self.context.get("variables", os.environ).get(name) or "")

    def _joined(self) -> str | None:
        """Identifier of the run that the caller has chosen."""
        if self.context.get("parent_run_id"):
            return None
        same = self._tracking_uri() == _absolute(self.context.get("tracking_uri", ""))
        run_id = self.context.get("run_id") if same else None
        return run_id or self._variable("MLFLOW_RUN_ID") or None

    def _find_run(self) -> str | None:
        """The run to write to, if there is one."""
        joined, training = self._joined(), self.training
        own, parent = self.context.get("own_run_id"), self.context.get("parent_run_id")
        if own:
            return str(own)
        if joined and training:
            run = self._client.get_run(joined)
            other = run.data.tags.get(TRAINING)
            if other not in (None, training):
                self.context |= {"parent_run_id": joined, "experiment_id": run.info.experiment_id}
                logger.warning(
                    "the MLflow run %s holds another training, so that this one is a child run of it", joined
                )
                found = self._children(joined, f"tags.`{TRAINING}` = '{training}'")
                return str(found[0].info.run_id) if found else None
            self._client.set_tag(joined, TRAINING, training)
        elif (self.uncertain or self.place.step) and training and not parent:
            where = [self._experiment_id(self._uri)]
            begun = self._client.search_runs(where, f"tags.`{TRAINING}` = '{training}'")
            self.uncertain = True  # it may have steps that the file of this folder has not
            return str(begun[0].info.run_id) if begun else None
        return joined or (self._find_child(parent) if parent else None)

    def _create_run(self, uri: str, parent: str | None) -> str:
        experiment_id = self.context["experiment_id"] if parent else self._experiment_id(uri)
        tags = {"mlflow.parentRunId": parent, TRAINING: self.training}
        tags = {name: value for name, value in tags.items() if value}
        run = self._client.create_run(experiment_id, run_name=self.config.tracking.run_name, tags=tags)
        return str(run.info.run_id)

    def _experiment_id(self, uri: str) -> str:
        name = self.config.tracking.mlflow_experiment
        if name is None and self._variable("MLFLOW_EXPERIMENT_ID"):
            return self._variable("MLFLOW_EXPERIMENT_ID")
        name = name or self._variable("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            if experiment.lifecycle_stage != "active":
                raise UserError(
                    "the MLflow experiment is deleted",
                    field="tracking.mlflow_experiment",
                    got=name,
                    remedy=f"`mlflow experiments restore -x {experiment.experiment_id}`, or choose"
                    " another name",
                )
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=_artifact_location(uri, name)))

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        # MLflow refuses to change a parameter: what the caller or an earlier fit wrote stays.
        known = {} if self._is_new else self._client.get_run(self.run_id).data.params
        fresh = [
            Param(_key(name), str(value)[:MAX_PARAM_VAL_LENGTH])
            for name, value in params.items()
            if _key(name) not in known
        ]
        for start in range(0, len(fresh), PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=fresh[start : start + PARAMS_PER_BATCH])

    def _key(self, name: str) -> str:
        """A name that MLflow takes, of this metric alone: ``accuracy@5`` becomes ``accuracy_5``, or, where
        that is another metric, ``accuracy_5_`` with a digest of the name."""
        known = self._names.get(name)
        if known is None:
            known = _key(name)
            if known in self._names.values() or not name:
                known = f"{known[:240]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
                logger.warning(
                    "MLflow cannot have the metric '%s' beside others, and calls it '%s'", name, known
                )
            self._names[name] = known
        return known

    def _read_written(self) -> None:
        """Return what an earlier attempt may have written without having noted it."""
        for key in self._client.get_run(self.run_id).data.metrics:
            found = self._client.get_metric_history(self.run_id, key)
            self._written |= {(key, metric.step) for metric in found}


def _key(name: str) -> str:
    """`name` in the characters that MLflow takes, without the parts that it would read as folders."""
    parts = re.sub(r"[^\w\-./ :]", "_", name)[:250].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "unnamed"


def _absolute(uri: str) -> str:
    """`uri` with the absolute path of a SQLite file: MLflow keeps connections by URI, so that a relative one
    would name the first directory's file in every other directory that the process or a trial works in."""
    database = _local_database(uri)
    if database is None:
        return uri
    return f"sqlite:///{database}{''.join(uri.partition('?')[1:])}"


def _local_database(uri: str) -> Path | None:
    """The file of a SQLite store, None for any other."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix).partition("?")[0]).absolute() if uri.startswith(prefix) else None


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Beside a SQLite file; None leaves the place to the store's server."""
    database = _local_database(uri)
    if database is None:
        return None
    return (database.parent / "mlruns" / re.sub(r"[^\w-]", "_", experiment)).as_uri()


@contextmanager
def _prepared(uri: str) -> Iterator[None]:
    """Create a new local store readable only by its owner; MLflow would let all users read it. Within the
    block, no other run makes its tables or experiments."""
    database = _local_database(uri)
    if database is None:
        yield
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    draw_apart(DRAW_NUMBERS)
    artifacts = database.parent / "mlruns"
    artifacts.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(database, os.O_CREAT | os.O_WRONLY, 0o600))
    folder = os.open(artifacts, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not database.stat().st_size:
            # Makes the experiment Default, whose artifacts a client would put into the working folder.
            SqlAlchemyStore(uri, artifacts.as_uri())  # type: ignore[no-untyped-call]
        yield
    finally:
        os.close(folder)
