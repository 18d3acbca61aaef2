"""THE training loop, the same for every backend.

::

    for epoch in epochs:
        for window in feed.windows(epoch, cursor):       # this rank's share of a global batch
            backend.run_window(window)                   # forward and backward, micro by micro
            backend.optimizer_step(max_norm)             # unscale, clip, check, step (C6)
            scheduler.step()                             # unless the step was skipped (C7)
            cursor moves                                 # a sample counts once its step is taken (C4)
            every log_every_n_steps: reduce, log, agree whether to stop (C8)
            every checkpoint.every_n_steps: save
            about once a second: agree whether a signal asks to save and go
        validate: every sample once (C5)
        decide best, step the epoch's scheduler, save

Losses stay on the device between log steps. Nothing here knows which backend runs.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.data import Feed, mix
from distributed.errors import UserError
from distributed.interfaces.callback import Context
from distributed.interfaces.history import History
from distributed.interfaces.task import Progress, Task
from distributed.resilience.phase_journal import stop_noting
from distributed.resilience.preemption import hearing
from distributed.system.garbage_collection import collect_as_usual, frozen_heap
from distributed.training.callback_runner import EventsMixin
from distributed.training.optimizers import build_scheduler, hyperparameters, take_hyperparameters
from distributed.training.resuming import StreamsMixin
from distributed.training.saving import CheckpointingMixin
from distributed.training.seeding import isolated_rng, seed_streams
from distributed.training.step_records import RecordingMixin
from distributed.training.trackers import TrackingMixin
from distributed.training.validation import ValidationMixin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed.interfaces.backend import Backend, Window
    from distributed.interfaces.plan import RunPlan
    from distributed.registry.catalog import Catalog

__all__ = ["TrainingLoop"]


class TrainingLoop(
    EventsMixin, TrackingMixin, RecordingMixin, ValidationMixin, StreamsMixin, CheckpointingMixin, Context
):
    """One rank's training. Also the `Context` that callbacks see.

    Args:
        plan: what was decided.
        task: the user's objects.
        backend: already set up.
        catalog: where trackers and callbacks come from.
        tracker_contexts: tracker name -> what its `capture` returned in the caller.
    """

    def __init__(
        self,
        plan: RunPlan,
        task: Task,
        backend: Backend,
        catalog: Catalog,
        tracker_contexts: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.plan, self.config, self.task = plan, plan.config, task
        self.backend, self.world, self.catalog = backend, backend.world, catalog
        self.tracker_contexts = tracker_contexts or {}
        slices = self.world.data_parallel_size * self.world.num_replicas
        if slices != plan.batch.data_parallel_size:
            raise ValueError(
                f"backend '{plan.spec.name}' cuts a global batch into {slices} slices"
                f" and its spec says {plan.batch.data_parallel_size}"
            )
        self.timers = backend.timers
        self.progress = task.progress or Progress()
        self.history = History(backend=plan.spec.name, world_size=self.world.size, batch=plan.batch.as_dict())
        self.history.best_accuracy = self.progress.best_accuracy
        self.until_epoch, self.until_step = self._goal()
        self._stop_reason: str | None = None

    # -- the spine -------------------------------------------------------------------

    def run(self) -> History:
        """Train as planned and return the record. Collective."""
        status = "failed"
        try:
            with hearing() if self.config.heeds_signals else nullcontext():
                self._start()
                started = perf_counter()
                with frozen_heap():
                    self._train()
                self.timers.enter("finish")
                self.finish_saving()
            self.history.train_time += perf_counter() - started
            status = "stopped" if self.history.stop_reason else "finished"
            self._track_history()
        except BaseException:
            stop_noting()  # what the rank did last is where it failed
            raise
        finally:
            self.abandon_saving()
            self.finish_tracking(status)
            self._notify("on_run_end", self, status)
        if self.plan.mode != "spawn":
            self.backend.release()
        return self.history

    def _train(self) -> None:
        while not self._done():
            metrics = self._train_epoch(self.progress.epoch)
            complete = not self._done_midway
            if self.history.preempted:
                break
            figures = self.validate()
            if figures:
                self._notify("on_validation_end", self, figures)
            metrics |= figures
            self._end_epoch(metrics, complete)
        self.save_when_preempted()

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        """The rest of one epoch; returns its training figures."""
        config, backend, progress, timers = self.config, self.backend, self.progress, self.timers
        every, save_every = config.log_every_n_steps, config.checkpoint.every_n_steps
        max_norm, until_step = config.gradient_clipping, self.until_step
        checks_now = self.world.device == "cpu" and config.on_nan == "stop"
        backend.set_training(True)
        self.begin_interval()
        self._done_midway = False
        enter = timers.enter
        enter("data", progress.step + 1, epoch)
        windows = self.feed.windows(epoch, progress.samples)
        mark = perf_counter()
        for window in windows:
            timers.add("data", perf_counter() - mark)
            enter("forward")
            loss, count = backend.run_window(window)
            if checks_now and not math.isfinite(loss):
                self.stop_on_nan(loss, progress.step)
            logs = (progress.step + 1) % every == 0
            enter("optimizer")
            result = backend.optimizer_step(max_norm, logs)
            self.record_step(loss, count, window.num_samples)
            self._advance(window, result.skipped)
            if self._step_callbacks:
                self._notify("on_step_end", self)
            if logs:
                enter("record")
                self.end_interval(result.norm)
            elif progress.step >= self.next_ask and progress.step != until_step:
                self.agree_to_go()
            if save_every and progress.step % save_every == 0 and not self._at_epoch_end():
                mark = perf_counter()
                enter("save")
                self.save_if_due(epoch_end=False, metrics=None)
                timers.add("save", perf_counter() - mark)
            if progress.step == until_step or self.history.stop_reason:
                self._done_midway = not self._at_epoch_end()
                break
            mark = perf_counter()
            enter("data", progress.step + 1)
        else:
            self._check_not_empty()
        return self.end_epoch_record()

    def _advance(self, window: Window, skipped: bool) -> None:
        """Move cursor and schedule past a step that has been dealt with."""
        progress = self.progress
        progress.samples += window.num_samples
        progress.total_samples += window.num_samples
        progress.step += 1
        if skipped:
            self.history.num_skipped_steps += 1
        elif self._scheduler_unit == "step" and self.scheduler is not None:
            self.scheduler.step()

    def _end_epoch(self, metrics: dict[str, float], complete: bool) -> None:
        """Decide on equal figures, step the epoch's scheduler, save, report."""
        self.timers.enter("epoch end")
        metrics = self.backend.broadcast_object(metrics)
        if complete:
            self.progress.epoch += 1
            self.progress.samples = 0
            self._step_epoch_scheduler(metrics)
        self._keep_best_accuracy(metrics)
        self.history.epochs.append(metrics)
        self._notify("on_epoch_end", self, metrics)
        self.agree_to_stop()
        self.track_epoch(metrics, self.progress.step)
        self.timers.enter("save")
        self.save_if_due(epoch_end=True, metrics=metrics)

    # -- beginning and end -----------------------------------------------------------

    def _start(self) -> None:
        """Everything before the first step: model, state, data, schedule, trackers."""
        task, config, world = self.task, self.config, self.world
        self.timers.enter("prepare")
        self.backend.prepare(task)
        self.model, self.optimizer = self.backend.module, self.backend.optimizer
        self.feed = self._make_feed(
            task.train_data, self.plan.batch.batch_size, self.plan.batch.gradient_accumulation_steps
        )
        self.val_feed = None
        if task.val_data is not None:
            self.val_feed = self._make_feed(task.val_data, self.plan.val_batch_size, 1, evaluation=True)
        self.check_same_data()
        self.steps_per_epoch = self.feed.num_windows
        self.total_steps = self._total_steps()
        given = hyperparameters(self.optimizer)
        self.scheduler, self._scheduler_unit = build_scheduler(
            task.scheduler, self.optimizer, config, self.total_steps
        )
        seed_streams(mix(config.seed, world.rank), config.deterministic)
        if task.run_state:
            self._take_up(task.run_state, [group["lr"] for group in given])
        self.timers.enter("resume")
        self._gather_callbacks()
        self.setup_checkpointing()
        if task.state_dir is not None:
            self.load_state(task.state_dir)
        elif task.progress is None and self.resume() and config.checkpoint.hyperparameters == "given":
            take_hyperparameters(self.optimizer, self.scheduler, given)
        self._start_samples, self._first_step = self.progress.total_samples, self.progress.step
        self.next_ask = self.progress.step + 1
        # What a tracker or callback imports or sets up may draw, and would again after every restart.
        with isolated_rng() if config.deterministic else nullcontext():
            self._announce()

    def _announce(self) -> None:
        """Tell the user, the trackers and the callbacks that the run begins here."""
        self._report_place()
        self.setup_tracking(
            {
                **self.plan.batch.as_dict(),
                "world_size": self.world.size,
                "precision": self.plan.precision,
                "learning_rate": self.plan.learning_rate,
            },
            self.tracked_place(),
        )
        collect_as_usual()
        self._notify("on_run_start", self)

    def warm_up(self, step: int) -> None:
        """Let the engine be as after a run's first step, on that step's samples, before a later
        state is loaded: under ``deterministic`` a run goes on with the same bits (C10)."""
        if self.config.deterministic and step > 0:
            with isolated_rng():
                self.backend.warm_up(self.feed.windows(0))

    def _make_feed(self, source: Any, batch_size: int, accumulation: int, evaluation: bool = False) -> Feed:
        config, world, backend = self.config, self.world, self.backend
        return Feed(
            source,
            batch_size * world.num_replicas,
            accumulation,
            rank=world.data_parallel_rank,
            size=world.data_parallel_size,
            seed=config.seed,
            broadcast=backend.broadcast_object,
            total=lambda value: int(backend.all_reduce([value])[0]) // world.model_parallel_size,
            drop_last=config.data.drop_last,
            per_sample_rng=config.data.per_sample_rng,
            evaluation=evaluation,
        )

    def _goal(self) -> tuple[float, int | None]:
        """(epoch, step) at which this `fit` ends; a second `fit` counts from where it begins."""
        config, start = self.config, self.progress
        until_step = None if config.max_steps is None else start.step + config.max_steps
        endless = until_step is not None and not config.is_explicit("epochs")
        return (math.inf if endless else start.epoch + config.epochs), until_step

    def _total_steps(self) -> int | None:
        """Optimizer steps of the whole run up to the goal, for decaying schedules."""
        by_epochs = None
        if self.steps_per_epoch is not None and self.until_epoch != math.inf:
            by_epochs = int(self.until_epoch) * self.steps_per_epoch
        if self.until_step is None or by_epochs is None:
            return by_epochs if self.until_step is None else self.until_step
        return min(by_epochs, self.until_step)

    def _done(self) -> bool:
        return self.reached_goal() or bool(self.history.stop_reason)

    def reached_goal(self) -> bool:
        """Whether all the epochs or steps asked for are behind us."""
        progress = self.progress
        return progress.epoch >= self.until_epoch or (
            self.until_step is not None and progress.step >= self.until_step
        )

    def _at_epoch_end(self) -> bool:
        return self.feed.ended(self.progress.samples)

    def _check_not_empty(self) -> None:
        if self.progress.samples == 0:
            raise UserError(
                "the data yielded no sample in an epoch"
                + (", for drop_last drops the only global batch" if self.feed.drop_last else ""),
                field="train_loader",
                got=f"{type(self.task.train_data.dataset).__name__}",
                allowed="at least one sample",
                remedy="Check the source it reads from, or use a"
                f" global batch of at most its length (now {self.feed.global_batch_size})",
            )

    def _step_epoch_scheduler(self, metrics: Mapping[str, float]) -> None:
        if self._scheduler_unit == "validation":
            self.scheduler.step(metrics.get("val_loss", metrics["train_loss"]))
        elif self._scheduler_unit == "epoch" and self.scheduler is not None:
            self.scheduler.step()

    def _keep_best_accuracy(self, metrics: Mapping[str, float]) -> None:
        accuracy = metrics.get("val_accuracy")
        if accuracy is not None:
            best = self.progress.best_accuracy
            self.progress.best_accuracy = accuracy if best is None else max(best, accuracy)
            self.history.best_accuracy = self.progress.best_accuracy

    def _report_place(self) -> None:
        if self.world.rank != 0:
            return
        place = self.progress
        if place.step:
            print(f"continues at epoch {place.epoch}, sample {place.samples}, step {place.step}", flush=True)
            if place.samples and self.feed.rereads:
                print(
                    f"the stream has no state_dict: reads its first {place.samples} samples again", flush=True
                )
        elif self.config.resume_from_checkpoint:
            print(f"no checkpoint in {self.config.checkpoint_dir} yet: starts from the beginning", flush=True)

    def _track_history(self) -> None:
        """Give the trackers the whole record as a file."""
        if self.world.rank == 0:
            with TemporaryDirectory(prefix="distributed-") as folder:
                path = Path(folder, "history.json")
                path.write_text(json.dumps(self.history.to_dict(), indent=1), encoding="utf-8")
                self.track_artifact(str(path))

    def export_result(self, folder: str) -> None:
        """Leave the final state for the process that called `fit`."""
        self.export_to(folder)

    def leftover_state(self) -> dict[str, Any]:
        """What a later `fit` in this process needs besides the objects themselves."""
        scheduler = self.scheduler
        return {
            "optimizer": self.optimizer,
            "rng": capture_rng(),
            "data": self.feed.state,
            "lineage": self._lineage,
            "records": self.record_state(),
            "best_checkpoint": self.history.best_checkpoint,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": self.backend.scaler_state(),
        }

    def _take_up(self, left: Mapping[str, Any], rates: list[float]) -> None:
        """Go on from what an earlier `fit` in this process left."""
        self._lineage, self._origin_step = left["lineage"], self.progress.step
        self.restore_records([left["records"]] * self.world.size)
        self.warm_up(self.progress.step)
        self.history.best_checkpoint = left["best_checkpoint"]
        restore_rng(left["rng"])
        self.feed.restore(left["data"])
        if self.scheduler is not None and left["scheduler"] is not None:
            self.scheduler.load_state_dict(left["scheduler"])
            # Building a scheduler sets the rate of its first step.
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
