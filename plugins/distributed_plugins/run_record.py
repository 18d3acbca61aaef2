"""The run's record: a file in the run's folder that ``report`` and ``runs`` read.

Rank 0 writes the events of the training; the process that called `fit` writes those that killed ranks
cannot. `distributed.operations.report.record_format` documents the lines.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distributed import __version__
from distributed.config import DistributedConfig, explain
from distributed.errors import Preempted, WorkerError
from distributed.interfaces.history import History
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.tracker import Tracker, TrackerSpec
from distributed.operations.report.record_format import VERSION, append
from distributed.registry.hookspecs import hookimpl

logger = logging.getLogger("distributed")

_VERSIONED = ("torch", "numpy", "deepspeed", "horovod", "ray", "tensorflow", "keras")
_TRACEBACK = 20_000
"""Number of characters kept of a traceback: its end, which has the error."""

_here = threading.local()
"""The `fit` that is under way in this thread."""


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    """The record, if there is a folder for it."""
    return [
        TrackerSpec(
            name="record",
            target="distributed_plugins.run_record:RecordTracker",
            enabled=lambda config: config.record_dir is not None,
            beside=False,  # so that a killed run keeps its curves
        )
    ]


@hookimpl
def on_run_start(plan: RunPlan) -> None:
    """Name the run, so that the lines of all its processes belong together."""
    _here.run = secrets.token_hex(6)


@hookimpl
def on_restart(plan: RunPlan, error: WorkerError) -> None:
    """Record why the ranks restart."""
    _write(plan, "restart", {"error": _about(error)})


@hookimpl
def on_run_end(plan: RunPlan, history: History | None, error: BaseException | None) -> None:
    """Record the end of the run; for a failed one also its plan, which its ranks may not have written."""
    if plan.joined is not None and plan.joined.rank != 0:
        return
    elsewhere = plan.mode == "spawn" and (plan.node_rank or (plan.counts and plan.num_nodes > 1))
    if history is not None:
        if not elsewhere:  # rank 0's line has it, and other hosts add nothing
            _write(plan, "end", _totals(history))
        return
    if isinstance(error, SystemExit) and elsewhere:
        return  # this host leaves, or was not there at the end: the others end the run
    reason = str(error) if isinstance(error, Preempted) else None
    if isinstance(error, KeyboardInterrupt):
        reason = "interrupted from the keyboard"
    plan_facts = {
        "backend": plan.spec.name,
        "world_size": plan.world_size,
        "num_nodes": plan.num_nodes,
        "device": plan.device,
        "precision": plan.precision,
        "batch": plan.batch.as_dict(),
    }
    _write(
        plan,
        "end",
        {
            "record": VERSION,
            "status": "stopped" if reason else "failed",
            "reason": reason,
            "error": None if isinstance(error, Preempted) else _about(error),
            "place": plan_facts,
            "config": explain(plan.config),
            "script": _script(),
        },
    )


class RecordTracker(Tracker):
    """Writes `config.record_dir` / ``record.jsonl``, one line a log step. Every line is with the
    operating system when a method returns, so that a killed run keeps its curves."""

    def __init__(self, config: DistributedConfig) -> None:
        assert config.record_dir is not None
        # The process may change its working folder later.
        self.config, self.folder = config, os.path.abspath(config.record_dir)
        self.context = {}
        self._attempt = secrets.token_hex(4)
        self._has_gaps = False

    @classmethod
    def capture(cls) -> dict[str, Any]:
        """``run``, and which process called `fit`."""
        run = getattr(_here, "run", None) or secrets.token_hex(6)
        return {"run": run, "script": _script(), "caller": _process()}

    def start(self, params: Mapping[str, Any]) -> None:
        """Write plan, hosts, and the step from which training starts.

        Raises:
            OSError: the folder cannot be written.
        """
        versions = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in _VERSIONED}
        self._line(
            "start",
            {
                "record": VERSION,
                "run": self.context.get("run", self._attempt),
                "script": self.context.get("script"),
                "name": self.config.tracking.run_name,
                "place": asdict(self.place),
                "learning_rate": params.get("learning_rate"),
                "config": explain(self.config),
                "versions": {
                    "distributed-trainer": __version__,
                    "python": platform.python_version(),
                    **{name: version for name, version in versions.items() if version},
                },
                "cores": len(os.sched_getaffinity(0)),
                "processes": [_process(), *filter(None, [self.context.get("caller")])],
            },
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a log step."""
        self._line("log", {"step": step, "figures": metrics})

    def log_epoch(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of an epoch."""
        self._line("epoch", {"step": step, "figures": metrics})

    def log_checkpoint(self, path: str, step: int) -> None:
        """Write that the state after `step` is saved."""
        self._line("checkpoint", {"step": step, "path": path})

    def finish(self, status: str) -> None:
        """Write how the ranks' part ended."""
        self._line("finish", {"status": status})

    def _line(self, kind: str, values: Mapping[str, Any]) -> None:
        try:
            append(self.folder, kind, {"attempt": self._attempt, **values})
        except OSError as error:
            # A full disk may have space again: later lines are tried.
            if kind == "start":
                raise
            if not self._has_gaps:
                logger.warning("the run's record in %s has a gap: %s", self.folder, error)
            self._has_gaps = True


def _write(plan: RunPlan, kind: str, values: Mapping[str, Any]) -> None:
    folder = plan.config.record_dir
    if folder is None:
        return
    try:
        append(folder, kind, {"run": getattr(_here, "run", None), **values})
    except OSError as error:
        logger.warning("the run's record cannot be written to %s: %s", folder, error)


def _totals(history: History) -> dict[str, Any]:
    return {
        "status": "stopped" if history.stop_reason else "finished",
        "reason": history.stop_reason,
        "preempted": history.preempted,
        "restarts": history.restarts,
        "totals": {
            "total_time": history.total_time,
            "train_time": history.train_time,
            "num_samples": history.num_samples,
            "samples_per_second": history.samples_per_second,
            "num_skipped_steps": history.num_skipped_steps,
            "best_accuracy": history.best_accuracy,
            "checkpoint": history.checkpoint,
            "best_checkpoint": history.best_checkpoint,
        },
    }


def _about(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if not isinstance(error, WorkerError):
        return {"summary": str(error) or type(error).__name__, "exc_type": type(error).__name__}
    return {
        "summary": error.summary,
        "rank": error.rank,
        "host": error.host,
        "exc_type": error.exc_type,
        "phase": error.phase,
        "step": error.step,
        "traceback": error.worker_traceback[-_TRACEBACK:],
    }


def _script() -> str:
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else ""


def _process() -> dict[str, Any]:
    """This process, so that a reader on this host can check whether it is alive."""
    import psutil

    own = psutil.Process()
    return {"host": socket.gethostname(), "pid": own.pid, "created": own.create_time()}
