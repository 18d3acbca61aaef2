"""Record of a trial: written by the trial itself after every epoch, read when the search is over."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distributed.errors import UserError, WorkerError
from distributed.interfaces.metric import larger_is_better, metric_name

RECORD = "trial.json"
_PREFERRED = ("val_accuracy", "val_loss", "accuracy", "loss", "train_loss")


@dataclass
class Trial:
    """One trial of a search.

    Attributes:
        name: name of its folder, and in the trackers.
        parameters: sampled parameters; under ``pbt`` the last ones.
        status: ``finished``; ``stopped`` by the scheduler or the time limit; ``failed``; ``nan`` where
            the optimized metric was not a number; ``waiting`` when it was never started; ``running``.
        metric: name of the optimized metric; None when none was reported.
        value: best value of `metric`, None without a finite one.
        seconds: duration of the trial in seconds, restarts included.
        error: cause of its failure, in one paragraph; None when it did not fail.
        checkpoint: path of its best checkpoint, or its newest; None without.
        reports: every epoch's metrics, and the result of `train_fn`, in their order.
        ranks: number of ranks that the search set; None where the trainer set it, or there was none.
        unread: names of parameters that the trial did not read, once it has ended.
    """

    name: str
    parameters: dict[str, Any]
    status: str = "waiting"
    metric: str | None = None
    value: float | None = None
    seconds: float = 0.0
    error: str | None = None
    checkpoint: str | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    ranks: int | None = None
    is_mistake: bool = False
    """The error was a UserError."""
    unread: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return {name: value for report in self.reports for name, value in report.items()}

    @property
    def counts(self) -> bool:
        """Whether its value may be the best: neither without one, nor of a trial that failed."""
        return self.value is not None and self.status in ("finished", "stopped")

    def knows(self, report: Mapping[str, Any]) -> bool:
        """Whether the epoch of `report` is recorded."""
        return any(_place(old) == _place(report) for old in self.reports if "epoch" in old)

    def add(self, report: Mapping[str, Any]) -> None:
        """Append metrics. A repeated report (an epoch after a kill, or the result of `train_fn`) replaces
        the earlier one."""
        self.reports = [old for old in self.reports if "epoch" in old]
        if "epoch" in report:
            again = _place(report)
            self.reports = [old for old in self.reports if _place(old) < again]
        self.reports.append(dict(report))

    def judge(self, metric: str | None, mode: str) -> None:
        """Set `metric`, `value` and, where a value is not a number, `status` from the reports."""
        self.metric = deciding(metric, self.metrics)
        values = [float(r[self.metric]) for r in self.reports if self.metric is not None and self.metric in r]
        if not values:
            return
        if not all(map(math.isfinite, values)):
            self.value = None
            self.status = "nan" if self.status in ("finished", "stopped") else self.status
            return
        self.value = (max if larger_is_better(mode, str(self.metric)) else min)(values)

    def line(self) -> str:
        """Result of the trial, in one line."""
        epochs = sum("epoch" in report for report in self.reports)
        after = f" after {epochs} epoch{'s'[: epochs != 1]}" if epochs else ""
        figure = "" if self.value is None else f", {self.metric} {self.value:.4g}"
        ended = {"running": "stopped"}.get(self.status, self.status)
        why = f": {self.error}" if self.error else ""
        idle = f", did not read {', '.join(self.unread)}" if self.unread else ""
        return f"trial {self.name} {ended}{after}{figure}{idle}, {self.seconds:.1f} s{why}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able copy."""
        return asdict(self)


def _place(report: Mapping[str, Any]) -> tuple[int, int]:
    return int(report.get("fit", 1)), int(report["epoch"])


def trial_folder(folder: str | Path, name: str) -> Path:
    """Folder of the trial called `name` in the search's `folder`."""
    return Path(folder, "trials", name)


def load_trial(folder: str | Path, name: str) -> Trial | None:
    """The record of one trial; None when it never began."""
    path = trial_folder(folder, name) / RECORD
    return Trial(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def is_number(value: Any) -> bool:
    """Whether `value` is a comparable number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def deciding(wanted: str | None, report: Mapping[str, Any]) -> str | None:
    """The name in `report` of the metric to optimize; None when it is not there.

    Args:
        wanted: name with or without ``val_``; None takes the first of val_accuracy, val_loss, accuracy,
            loss and train_loss, else the only metric there is.
        report: metrics of an epoch, or the result of `train_fn`.
    """
    figures = {name: value for name, value in report.items() if is_number(value)}
    if wanted is not None:
        try:
            return metric_name(wanted, figures)
        except UserError:
            return None
    found = next((name for name in _PREFERRED if name in figures), None)
    return found or (next(iter(figures)) if len(figures) == 1 else None)


def ranked(trials: Iterable[Trial], mode: str) -> list[Trial]:
    """Best first; those without a value last."""

    def key(trial: Trial) -> tuple[bool, float]:
        if trial.value is None or trial.status in ("failed", "nan"):
            return True, 0.0
        more = larger_is_better(mode, str(trial.metric))
        return False, -trial.value if more else trial.value

    return sorted(trials, key=key)


def best_of(trials: Iterable[Trial], metric: str | None, mode: str) -> Trial:
    """The trial with the best value.

    Raises:
        UserError: all failed with user errors, no trial reported the metric, trials reported different
            metrics, or all values were NaN.
        WorkerError: all failed otherwise.
    """
    trials = list(trials)
    usable = [trial for trial in trials if trial.counts]
    if not usable:
        raise _nothing(trials, metric)
    names = sorted({str(t.metric) for t in usable})
    if len(names) > 1:
        raise UserError(
            f"trials reported different metrics: {', '.join(names)}",
            field="metric",
            remedy="Name the one to optimize, e.g. metric='val_loss'",
        )
    return ranked(usable, mode)[0]


def _nothing(trials: list[Trial], metric: str | None) -> Exception:
    failed = [t for t in trials if t.status == "failed"]
    if failed and len(failed) == len([t for t in trials if t.status != "waiting"]):
        first = failed[0]
        what = f"all {len(failed)} trials failed" if len(failed) > 1 else "the only trial failed"
        text = f"{what}; trial {first.name}: {first.error}"
        if first.is_mistake:
            return UserError(text)
        return WorkerError(text, rank=-1, host=socket.gethostname(), exc_type="TrialFailed")
    if any(t.status == "nan" for t in trials):
        name = next(t.metric for t in trials if t.status == "nan")
        return UserError(
            f"in every trial that ended, {name} was not a number",
            field="search_space",
            remedy="Narrow the ranges, e.g. smaller learning rates, or set gradient_clipping",
        )
    names = sorted(
        {name for t in trials for r in t.reports for name, v in r.items() if is_number(v)} - {"fit"}
    )
    if not names and any(t.status == "finished" for t in trials):
        return UserError(
            "train_fn returned no number, and no trial reported one",
            field="metric",
            got=metric,
            allowed="a number in what it returns, such as {'val_loss': 0.1}",
            remedy="Return one. A list in search_space is a single value: {'choice': [...]} draws from it",
        )
    if not names:
        return UserError(
            "no trial reported a metric before the search ended", field="time_limit", remedy="Raise it"
        )
    return UserError(
        "no trial reported this metric",
        field="metric",
        got=metric,
        allowed=", ".join(names),
        remedy="Name one of them",
    )
