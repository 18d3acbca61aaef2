"""RayTune: run the trials of a search by Ray Tune."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

from distributed.interfaces.search import Search, SearchEngine, TrialEnd
from distributed.operations.tuning.trial import MISSING, SCORE
from distributed.operations.tuning.trial_record import load_trial
from distributed.system.output import print_line
from distributed.system.private_files import write_private
from distributed.system.processes import environment
from distributed_backends.ray.cluster import connected
from distributed_backends.ray.section import RaySection
from distributed_backends.ray.tune.schedulers import hands_over, make_scheduler, own_metric
from distributed_backends.ray.tune.search_space import count_grid, describe, translate
from distributed_backends.ray.tune.slots import TrialSlots, find_slots

_NAME = "ray"
"""The folder within the search's that Ray keeps its own record in."""
_SNAPSHOT = "2"
"""Seconds between Ray's snapshots of the search: what a kill can cost. Trials keep records of their own."""
_VARIABLES = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": _SNAPSHOT,
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # A NaN score is not reported; the record has it.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "5",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
_GRACE = 15.0
"""Seconds that a trial's trainer has to end when the trial is stopped."""
_OVER = ("TERMINATED", "ERROR")
"""Ray's states of a trial that is never run again."""


@dataclass
class _CurrentLimits:
    """Values that may change when a search is resumed: Ray would restore the first start's.

    Attributes:
        time_limit: seconds from now on, None without.
        max_concurrent: maximum number of concurrent trials, 0 for as many as fit.
        live: names of the trials that were begun and have not ended.
    """

    time_limit: float | None
    max_concurrent: int
    live: frozenset[str] = frozenset()


_now: _CurrentLimits | None = None


class RayTune(SearchEngine):
    """Trials are actors of Ray Tune, each with resources for all its ranks on one node: the trial starts
    them itself, as `fit` does everywhere, so no rank waits for resources that the trial holds."""

    def describe(self, space: Mapping[str, Any]) -> dict[str, str]:
        return describe(space)

    def hands_over(self, search: Search) -> int:
        return hands_over(search)

    def num_trials(self, search: Search) -> int:
        return search.num_samples * count_grid(translate(search.space))

    def run(self, search: Search) -> list[TrialEnd]:
        slots = find_slots(search)
        with (
            connected(RaySection(address=search.address), slots.num_cpus, slots.resources),
            environment(_VARIABLES),
            _quiet(),
        ):
            slots.check()
            print_line(slots.summary(), sys.stdout)
            results = _tuner(search, slots).fit()
            ends = [_end(trial, results[i]) for i, trial in enumerate(results._experiment_analysis.trials)]
        _forget_checkpoints(search)
        return ends


def _tuner(search: Search, slots: TrialSlots) -> tune.Tuner:
    actor = tune.with_resources(_actor(_order(search)), slots.of_trial())
    path = Path(search.folder, _NAME)
    global _now
    _now = _CurrentLimits(search.time_limit, slots.max_concurrent())
    # The newest is the one that Ray takes; its name is the time.
    states = sorted(path.glob("experiment_state-*.json"))
    if search.resume and tune.Tuner.can_restore(str(path)) and states:
        _now.live = _reopen(states[-1], search)
        return tune.Tuner.restore(str(path), actor, resume_unfinished=True)
    space = translate(search.space)
    scheduler = make_scheduler(search, space)
    metric = None if own_metric(scheduler) else SCORE
    generator = _Samples(random_state=search.seed, max_concurrent=_now.max_concurrent)
    # Trials have the same names when the search is restarted.
    generator._uuid_prefix = ""
    return tune.Tuner(
        actor,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=metric,
            mode="max" if metric else None,
            search_alg=generator,
            scheduler=scheduler,
            num_samples=search.num_samples,
            # Importing takes longer than a small trial. On a GPU a process also holds memory.
            reuse_actors=slots.device == "CPU",
            trial_dirname_creator=_folder_name,
        ),
        run_config=tune.RunConfig(
            name=_NAME,
            storage_path=search.folder,
            verbose=0,
            stop=_Ends(search.time_limit),
            callbacks=[_TrialPrinter(search.folder)],
        ),
    )


def _order(search: Search) -> dict[str, Any]:
    """A trial's parameters as plain values, because it cannot import our code yet."""
    return {
        "folder": search.folder,
        "cwd": os.getcwd(),
        "path": [entry or os.getcwd() for entry in sys.path],
        "seed": search.seed,
        "grace": _GRACE,
    }


def _actor(order: dict[str, Any]) -> type[Any]:
    from ray.tune.trainable import wrap_function

    def train(config: dict[str, Any]) -> None:
        # Pickled by value, because our code may not be importable yet.
        import sys

        sys.path.extend(entry for entry in order["path"] if entry not in sys.path)
        from distributed_backends.ray.tune.trial import run

        run(order, config)

    class Trial(wrap_function(train)):  # type: ignore[misc]
        """Let the trainer end before the process or its next trial does, so that ranks and trackers close
        their resources."""

        def cleanup(self) -> None:
            self._join(order["grace"])
            super().cleanup()

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            # Ray waits 2 s, then fails the next trial without a report to the search, which never returns.
            self._join(None)
            return bool(super().reset_config(new_config))

        def _join(self, timeout: float | None) -> None:
            from ray.train._internal.session import get_session

            session = get_session()
            if session is not None and session.training_started:
                session.stop_event.set()
                session.continue_lock.release()
                session.training_thread.join(timeout)

    return Trial


def _reopen(file: Path, search: Search) -> frozenset[str]:
    """Mark trials that a time limit cut off as unfinished in Ray's record; the names of all unfinished
    ones. A scheduler may have stopped a trial, so under one a trial that began stays stopped."""
    state = json.loads(file.read_text(encoding="utf-8"))
    live = set()
    for entry in state["trial_data"]:
        trial = json.loads(entry[0])
        known = load_trial(search.folder, trial["trial_id"])
        cut_off = known is None or (known.status == "running" and search.scheduler is None)
        if trial["status"] == "TERMINATED" and cut_off:
            trial["status"] = "PENDING"
            entry[0] = json.dumps(trial)
        if trial["status"] not in _OVER:
            live.add(str(trial["trial_id"]))
    write_private(file, json.dumps(state).encode())
    return frozenset(live)


class _Samples(BasicVariantGenerator):
    """Continue with the samples that a time limit cut off."""

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)  # type: ignore[no-untyped-call]
        if _now is not None:
            # If there are no more of them, the next call finds out.
            self._finished = False
            self.max_concurrent, self._live_trials = _now.max_concurrent, set(_now.live)


class _Ends(tune.Stopper):
    """End the search after its time limit, or when a trial has ended without reporting the metric: no
    other will. Ray's own limit would count what earlier starts of the same search took."""

    def __init__(self, time_limit: float | None) -> None:
        self.found, self.time_limit = False, time_limit
        self.until: float | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.found = self.found or bool(result.get(MISSING))
        return False

    def stop_all(self) -> bool:
        if self.until is None and self.time_limit is not None:
            self.until = time.monotonic() + self.time_limit
        return self.found or (self.until is not None and time.monotonic() >= self.until)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.found, self.until = False, None
        if _now is not None:
            self.time_limit = _now.time_limit


class _TrialPrinter(tune.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._print(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._print(trial, failed=True)

    def _print(self, trial: Any, failed: bool = False) -> None:
        known = load_trial(self.folder, trial.trial_id)
        if known is not None:
            known.status = "failed" if failed else known.status
            print_line(known.line(), sys.stdout)


def _folder_name(trial: Any) -> str:
    return str(trial.trial_id)


def _end(trial: Any, result: Any) -> TrialEnd:
    return TrialEnd(
        name=str(trial.trial_id),
        parameters=dict(trial.config),
        failed=trial.status == "ERROR",
        error=str(result.error) if result.error else None,
    )


def _forget_checkpoints(search: Search) -> None:
    """Ray's copies have served; each trial keeps its own."""
    for copied in Path(search.folder, _NAME).glob("*/checkpoint_*"):
        shutil.rmtree(copied, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's log lines about failed trials, whose record has the cause."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray.tune", "ray.train")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
