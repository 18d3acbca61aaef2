"""One trial, in its own process: configuration overrides for the trainers that `train_fn` builds,
and reports to the search."""

from __future__ import annotations

import json
import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from distributed.config import DistributedConfig, Layer
from distributed.config.load import override
from distributed.config.script_overlay import ScriptRun, command_line
from distributed.errors import UserError
from distributed.interfaces.metric import larger_is_better
from distributed.operations.report.formats import plural
from distributed.operations.tuning.parameter_use import SampledParameters
from distributed.operations.tuning.trial_channel import EpochReport, TrialListener
from distributed.operations.tuning.trial_record import (
    RECORD,
    Trial,
    deciding,
    is_number,
    load_trial,
    trial_folder,
)
from distributed.redaction import redact_text
from distributed.system.private_files import write_private

ORDER = "order.bin"
"""The file in a search's folder that holds its `TrialOrder`."""
SCORE = "search_score"
"""Key of the optimized metric in a report, negated if less is better."""
EPOCHS = "search_epochs"
"""Key of the number of complete epochs in a report."""
MISSING = "search_metric_missing"
"""Key in the last report of a trial that never reported the metric: no other trial will."""


class Session(ABC):
    """A trial's connection to the engine that runs it.

    Attributes:
        checkpoint: checkpoint to resume from; None: the newest in the trial's own folder.
    """

    name: str
    checkpoint: str | None = None

    @abstractmethod
    def report(self, figures: Mapping[str, Any], checkpoint: str | None) -> None:
        """Report to the engine; returns when it has decided.

        Raises:
            SystemExit: the trial is to stop.
        """


@dataclass(frozen=True)
class TrialOrder:
    """Parameters of a search, for all its trials.

    Attributes:
        ranks: number of ranks that a trial may start.
        mode: ``auto``, ``max`` or ``min``.
        checkpoints: trials save, each in a folder of its own.
        hands_over: epochs after each of which the engine gets a copy of the checkpoint; 0 is never.
        max_epochs: maximum epochs per trial, None for its configuration's.
        layers: configuration overrides for every trainer of a trial.
        tracker_contexts: tracker name -> context of the search's own run.
    """

    train_fn: Callable[[dict[str, Any]], Any]
    folder: str
    ranks: int = 1
    metric: str | None = None
    mode: str = "auto"
    checkpoints: bool = True
    hands_over: int = 0
    max_epochs: int | None = None
    layers: tuple[Layer, ...] = ()
    tracker_contexts: Mapping[str, dict[str, Any]] = field(default_factory=dict)


class TrialRun(ScriptRun):
    """Override a trial's trainers: checkpoint folders, names in the trackers.

    Args:
        changed: whether the parameters differ from those at the time of the checkpoint.

    Attributes:
        ranks: number of ranks that the search set for the last trainer; None where the trainer set it.
    """

    ranks: int | None = None

    def __init__(
        self,
        order: TrialOrder,
        name: str,
        parameters: Mapping[str, Any],
        checkpoint: str | None = None,
        changed: bool = False,
    ) -> None:
        self.order, self.name, self.checkpoint, self.changed = order, name, checkpoint, changed
        super().__init__([])
        params = {name: value if is_number(value) else str(value) for name, value in parameters.items()}
        self.tracker_contexts = {
            tracker: {**context, "params": params} for tracker, context in order.tracker_contexts.items()
        }

    @property
    def layers(self) -> list[Layer]:
        """The search's configuration, the sampled values, then the folders of the next fit."""
        return [*self.order.layers, *self.given, Layer("DistributedTuner", self._places())]

    @layers.setter
    def layers(self, given: list[Layer]) -> None:
        self.given = given
        self.sampled = frozenset(name for layer in given for name in layer.values)

    def complete(self, config: DistributedConfig) -> DistributedConfig:
        """`config` with as many ranks and no more epochs than the search allows.

        Raises:
            UserError: it asks for more ranks than the trial holds, or for other nodes.
        """
        order, ranks = self.order, config.num_ranks
        if config.num_nodes > 1 or (ranks or 1) > order.ranks:
            raise UserError(
                f"a trial of this search has {plural(order.ranks, 'slot')} on one node, and"
                f" its trainer requests {ranks or 1} on {plural(config.num_nodes, 'node')}",
                field="ranks_per_trial",
                got=order.ranks,
                remedy=f"DistributedTuner(..., ranks_per_trial={ranks or 1}), or fewer ranks in train_fn",
            )
        values: dict[str, Any] = {}
        self.ranks = order.ranks if ranks is None else None
        if ranks is None and order.ranks > 1:
            values["num_processes"] = order.ranks
        if order.max_epochs is not None and config.epochs > order.max_epochs:
            values["epochs"] = order.max_epochs
        return override(config, values, "DistributedTuner") if values else config

    def _places(self) -> dict[str, Any]:
        if self.num_fits and self.order.hands_over:
            raise UserError(
                "under this scheduler a trial continues from another's checkpoint, which does not cover a"
                " second trainer",
                field="scheduler",
                remedy="Call fit once in train_fn, or use scheduler='asha'",
            )
        suffix = f"_{self.num_fits + 1}" if self.num_fits else ""
        places: dict[str, Any] = {
            "tracking.run_name": f"{self.name}{suffix}",
            "tracking.progress": "off",
            # In a shared record, a trial would look like a resumed run.
            "tracking.record_dir": None,
        }
        if not self.order.checkpoints:
            return places
        metric = self.order.metric or ""
        if metric.startswith("val_"):
            places |= {"checkpoint.metric": metric, "checkpoint.mode": self.order.mode}
        return {
            **places,
            "checkpoint_dir": str(trial_folder(self.order.folder, self.name) / f"checkpoints{suffix}"),
            "checkpoint_frequency": 1,
            "checkpoint.keep_last": 1,
            # An epoch is reported once its checkpoint is there.
            "checkpoint.asynchronous": False,
            "checkpoint.on_signal": False,
            "checkpoint.hyperparameters": "given" if self.changed else "saved",
            # Another trial's decision to stop is none about these parameters.
            "checkpoint.continue_stopped": self.changed,
            "resume_from_checkpoint": self.checkpoint or True,
        }


def run_trial(order: TrialOrder, parameters: Mapping[str, Any], session: Session) -> None:
    """Train with `parameters` and record the results. A trial that has ended before, in a search that was
    interrupted, only repeats its last report.

    Raises:
        UserError: `train_fn` neither trained nor returned metrics, or returned something else.
        SystemExit: the engine stopped the trial.
        RuntimeError: the trial failed; its record has the cause.
    """
    _Trial(order, parameters, session).run()


class _Trial:
    def __init__(self, order: TrialOrder, parameters: Mapping[str, Any], session: Session) -> None:
        self.order, self.session = order, session
        self.given = dict(parameters)
        self.folder = trial_folder(order.folder, session.name)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        plain = _plain(self.given)
        known = load_trial(order.folder, session.name)
        self.changed = known is not None and known.parameters != plain
        self.record = known or Trial(session.name, plain)
        self.record.parameters = plain
        self.began = time.monotonic() - self.record.seconds
        self.stopped = False

    def run(self) -> None:
        record = self.record
        if record.status == "finished":
            self._report(record.metrics, None, scored=not self.order.hands_over)
            return
        if record.status == "failed":
            raise RuntimeError(record.error)
        record.status, record.error = "running", None
        self._write()
        run = TrialRun(
            self.order,
            self.session.name,
            self.given,
            self.session.checkpoint,
            self.changed and self.session.checkpoint is not None,
        )
        self.script, listener = run, TrialListener(self._record_epoch, waits=self.order.checkpoints)
        try:
            with listener.open(), command_line(run):
                sampled = SampledParameters(self.given)
                returned = self.order.train_fn(sampled)
                record.unread = sorted(sampled.unread)
            if listener.error is not None:
                raise listener.error
            if not self.stopped:
                self._conclude(returned, run.num_fits)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a user's function raises is recorded
            if not self.stopped:
                self._fail(error)
        if self.stopped:
            raise SystemExit(0)

    def _record_epoch(self, received: EpochReport) -> None:
        # num_fits has counted the fit under way.
        fit = self.script.num_fits
        self.record.ranks = self.script.ranks
        report = received.metrics if fit < 2 else {**received.metrics, "fit": fit}
        if received.again and self.record.knows(report):
            return
        self.record.add(report)
        self.record.checkpoint = self._best_checkpoint() or received.checkpoint
        self._write()
        every = self.order.hands_over
        due = every and not received.last and (report["epoch"] + 1) % every == 0
        # After its last epoch a trial cannot continue from another's checkpoint.
        self._report(report, received.checkpoint if due else None, scored=not (every and received.last))

    def _conclude(self, returned: Any, num_fits: int) -> None:
        if returned is not None and not isinstance(returned, Mapping):
            raise UserError(
                "train_fn must return its last report or nothing",
                field="train_fn",
                got=type(returned).__name__,
                allowed="a dictionary of metrics, or nothing after a fit",
            )
        if not num_fits and not returned:
            raise UserError(
                "train_fn called no fit and returned no metrics, so the trial has no result",
                field="train_fn",
                remedy="Call Trainer(...).fit(...) in it, or return a dictionary such as {'accuracy': 0.9}",
            )
        figures = {str(name): _figure(value) for name, value in (returned or {}).items()}
        figures = {name: value for name, value in figures.items() if value is not None}
        last = {**self.record.metrics, **figures}
        if figures:
            self.record.add(figures)
            # The trial may be stopped at this report, and then counts with it.
            self._write()
        judged = deciding(self.order.metric, self.record.metrics) is not None
        if figures or not judged:
            self._report(last, None, missing=not judged, scored=not self.order.hands_over)
        self.record.status = "finished"
        self._write()

    def _fail(self, error: BaseException) -> NoReturn:
        self.record.status, self.record.is_mistake = "failed", isinstance(error, UserError)
        text = redact_text(str(error)).partition("\n")[0]
        self.record.error = text if self.record.is_mistake else f"{type(error).__name__}: {text}"
        details = redact_text("".join(traceback.format_exception(error)))
        self._write()
        write_private(self.folder / "error.txt", details.encode())
        # Not every exception can be pickled for the search.
        raise RuntimeError(f"{self.record.error}\n\n{details}") from None

    def _report(
        self, report: Mapping[str, Any], checkpoint: str | None, missing: bool = False, scored: bool = True
    ) -> None:
        """Report to the engine. A NaN score is left out, because a scheduler cannot compare it.

        Raises:
            SystemExit: the trial is to stop.
        """
        name = deciding(self.order.metric, report)
        extra: dict[str, Any] = {}
        if scored and name is not None and math.isfinite(report[name]):
            more = larger_is_better(self.order.mode, name)
            extra[SCORE] = float(report[name]) if more else -float(report[name])
        if "epoch" in report:
            fit = report.get("fit", 1)
            before = [r for r in self.record.reports if "epoch" in r and r.get("fit", 1) < fit]
            extra[EPOCHS] = len(before) + int(report["epoch"]) + 1
        if missing:
            extra[MISSING] = 1
        try:
            self.session.report({**report, **extra}, checkpoint)
        except SystemExit:
            # An exit of the user's own function looks the same, and is a failure.
            self.stopped = True
            raise

    def _best_checkpoint(self) -> str | None:
        from distributed.checkpoint.checkpointer import PortableCheckpointer

        kept = self.folder / "checkpoints"
        return PortableCheckpointer(str(kept), keep_last=None).best() if kept.exists() else None

    def _write(self) -> None:
        self.record.seconds = time.monotonic() - self.began
        self.record.judge(self.order.metric, self.order.mode)
        write_private(self.folder / RECORD, json.dumps(self.record.to_dict()).encode())


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as JSON values; NumPy's numbers as numbers, other objects by their repr."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(parameters), default=_as_plain))
    return plain


def _as_plain(value: Any) -> Any:
    figure = _figure(value)
    return repr(value) if figure is None else figure


def _figure(value: Any) -> float | int | None:
    """`value` as a number, of one-element tensors and NumPy's scalars too; None when it is none."""
    if is_number(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool | str) or not hasattr(value, "item"):
        return None
    try:
        found = value.item()
    except (RuntimeError, ValueError):
        return None
    return found if is_number(found) else None
