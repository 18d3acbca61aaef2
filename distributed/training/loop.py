"""THE training loop, the same for every backend.

::

    for epoch in epochs:
        for window in feed.windows(epoch, cursor):       # this rank's share of a global batch
            backend.run_window(window)                   # forward and backward, micro by micro
            backend.optimizer_step(max_norm)             # unscale, clip, check, step (C6)
            schedule.after_step(step)                    # unless the step was skipped (C7)
            cursor moves                                 # a sample counts once its step is taken (C4)
            yield StepRecord                             # to `fit`, or to `Trainer.train_step`
            every log_every_n_steps: reduce, log, agree whether to stop (C8)
            every checkpoint.every_n_steps: save
            about once a second: agree whether a signal has preempted the run
        give all ranks the same weights, if they have their own
        validate: every sample once (C5)
        decide best, step the epoch's scheduler, save

Losses stay on the device between log steps. Nothing here depends on which backend runs. The loop knows the
order of things; each part owns its state:

=============  ==================================================================
`state`        what a checkpoint holds besides model and optimizer
`schedule`     the learning-rate scheduler
`callbacks`    the callbacks of this rank
`trackers`     where rank 0 writes metrics
`records`      losses, phase times, checksums, stragglers
`consensus`    stop requests and signals
`validator`    the validation pass
`saver`        when and what to save; `resumer` is its other half
=============  ==================================================================
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

from distributed.checkpoint.random_state import same_streams
from distributed.data import mix
from distributed.errors import UserError
from distributed.interfaces.backend import Backend, Window
from distributed.interfaces.callback import Context
from distributed.interfaces.history import History
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Progress, Task
from distributed.registry.catalog import Catalog
from distributed.resilience.phase_journal import freeze_journal
from distributed.resilience.preemption import catch_signals
from distributed.system.garbage_collection import collect_as_usual, frozen_heap
from distributed.system.output import print_line
from distributed.tracking.trackers import Trackers, run_position
from distributed.training.callback_runner import CallbackRunner
from distributed.training.feeds import train_feed, val_feeds
from distributed.training.loss_parameters import unwrapped
from distributed.training.mixins.checkpointing import CheckpointingMixin
from distributed.training.mixins.tracking import TrackingMixin
from distributed.training.optimizers import hyperparameters, take_hyperparameters
from distributed.training.read_ahead import ReadAhead
from distributed.training.resuming import Resumer
from distributed.training.saving import Saver
from distributed.training.schedule import Schedule
from distributed.training.schedule_checks import Extent
from distributed.training.seeding import seed_streams
from distributed.training.state import TrainState
from distributed.training.step_records import StepRecord, StepRecords, not_finite
from distributed.training.stop_consensus import Goal, StopConsensus, describe_stop
from distributed.training.validation import Validator, check_same_data


class TrainingLoop(CheckpointingMixin, TrackingMixin, Context):
    """One rank's training. Also the `Context` that callbacks get.

    Args:
        task: the user's objects; without data when the caller brings each batch to `steps`.
        backend: already set up.
        catalog: where trackers and callbacks are registered.
        tracker_contexts: tracker name -> what its `capture` returned in the caller.

    Raises:
        ValueError: the backend's ranks do not match the plan.
    """

    def __init__(
        self,
        plan: RunPlan,
        task: Task,
        backend: Backend,
        catalog: Catalog,
        tracker_contexts: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        _check_slices(plan, backend)
        self.plan, self.config, self.task, self.backend = plan, plan.config, task, backend
        self.world, self.timers = backend.world, backend.timers
        self.progress = task.progress or Progress()
        self.history = History(backend=plan.spec.name, world_size=self.world.size, batch=plan.batch.as_dict())
        self.history.best_accuracy = self.progress.best_accuracy
        self.goal = Goal.of(plan.config, self.progress)
        self.feed: Any = train_feed(plan, task, backend)
        self.planned_samples = None if self.feed is None else self.feed.num_samples
        self.steps_per_epoch = None if self.feed is None else self.feed.num_windows
        self.total_steps = self.goal.total_steps(self.steps_per_epoch)
        self.schedule = Schedule()
        self.callbacks = CallbackRunner(self, task.callbacks, catalog)
        self.trackers = Trackers(plan.config, backend.world, catalog, tracker_contexts)
        axes = plan.dims.model_axes
        self.state = TrainState(self.progress, self.schedule, self.callbacks, self.feed, axes)
        self.records = StepRecords(plan.config, backend, self.state, self.history)
        self.consensus = StopConsensus(backend, self.progress, self.history, self.goal)
        self.validator = Validator(backend, val_feeds(plan, task, backend))
        self.saver = Saver(
            plan.config, backend, self.state, self.history, self._report_checkpoint, plan.lease
        )
        self.resumer = Resumer(self.saver)

    # -- what callbacks call -----------------------------------------------------------

    def request_stop(self, reason: str, *, final: bool = True) -> None:
        self.consensus.request(reason, final)

    @contextmanager
    def whole_model(self) -> Iterator[Any]:
        self.callbacks.refuse_on_rank_zero("context.whole_model()")
        with self.backend.whole_model() as model:
            yield unwrapped(model)

    def log(self, name: str, value: float) -> None:
        if self.records.log(name, value):
            self.trackers.log_metrics({name: value}, self.progress.step)

    # -- the spine -------------------------------------------------------------------

    def run(self) -> History:
        """Train as planned and return the record. Collective."""
        status = "failed"
        try:
            with catch_signals() if self.config.heeds_signals else nullcontext():
                self._start()
                started = perf_counter()
                with frozen_heap():
                    self._train()
                self.timers.enter("finish")
                self.saver.finish()
            self.history.train_time += perf_counter() - started
            status = "stopped" if self.history.stop_reason else "finished"
            self.trackers.log_history(self.history)
        except BaseException:
            freeze_journal()  # the last phase on record is where the rank failed
            raise
        finally:
            self.saver.abandon()
            self.trackers.close(status)
            try:
                self.callbacks.notify("on_run_end", status)
            finally:
                self.saver.release()
        if self.plan.mode != "spawn":
            self._share_buffers()
            self.backend.switch_optimizer(False)
            self.backend.release()
        return self.history

    def _share_buffers(self) -> None:
        """Give all ranks, of which each keeps its model, the buffers of rank 0, as before a validation."""
        self.backend.set_training(False)
        self.backend.set_training(True)

    def steps(self, windows: Iterable[Window], check_losses: bool = False) -> Iterator[StepRecord]:
        """Take an optimizer step for each window, and yield its record with the cursor behind it.

        Args:
            windows: this rank's share of each global batch.
            check_losses: under ``on_nan=stop``, check each loss before it reaches the weights also where
                that waits for the device. On CPU it is always done.

        Raises:
            UserError: a loss is not finite; the weights are as before.
        """
        config, backend, progress, timers = self.config, self.backend, self.progress, self.timers
        max_norm, every = config.gradient_clipping, config.log_every_n_steps
        checks = config.on_nan == "stop" and (check_losses or self.world.device == "cpu")
        groups, enter = self.optimizer.param_groups, timers.enter
        load = windows.load if isinstance(windows, ReadAhead) else None
        mark = perf_counter()
        for window in windows:
            timers.add("data", perf_counter() - mark)
            enter("forward")
            loss, count = backend.run_window(window)
            if checks and not math.isfinite(loss):
                raise not_finite(loss, progress.step + 1, progress.epoch, backend)
            logged = (progress.step + 1) % every == 0
            enter("optimizer")
            norm, skipped = backend.optimizer_step(max_norm, logged)
            rate = groups[0]["lr"]
            self._advance(window.num_samples, skipped)
            if load is not None:  # before anything waits for the device
                mark = perf_counter()
                enter("data")
                load()
                timers.add("data", perf_counter() - mark)
            yield StepRecord(progress.step, loss, count, window.num_samples, rate, norm, skipped, logged)
            mark = perf_counter()
            enter("data", progress.step + 1)

    def _advance(self, num_samples: int, skipped: bool) -> None:
        """Move cursor and schedule past a step."""
        progress = self.progress
        progress.samples += num_samples
        progress.total_samples += num_samples
        progress.step += 1
        if skipped:
            self.history.num_skipped_steps += 1
        else:
            self.schedule.after_step(progress.step)

    def _train(self) -> None:
        while not (self.goal.reached(self.progress) or self.history.stop_reason):
            complete = self._train_epoch()
            metrics = self.records.epoch_metrics()
            if self.history.preempted:
                break
            self.backend.synchronize()
            validated = self.validator.validate()
            if validated:
                self.callbacks.notify("on_validation_end", validated)
            self._end_epoch(metrics | validated, complete)
        if not self.history.preempted:
            self.backend.synchronize()  # a run may resume where it has nothing left to train
        self.saver.save_if_stopped()

    def _train_epoch(self) -> bool:
        """Train on the rest of an epoch; False when the run ends before the epoch does."""
        progress, complete = self.progress, True
        self.backend.set_training(True)
        self.records.begin_epoch()
        self.timers.enter("data", progress.step + 1, progress.epoch)
        windows = self.feed.windows(progress.epoch, progress.samples)
        self._check_length()
        if self.backend.loads_ahead and self.feed.can_read_ahead:
            windows = ReadAhead(windows, self.backend)
        for record in self.steps(windows):
            self._after_step(record)
            if progress.step == self.goal.step or self.history.stop_reason:
                complete = self.feed.ended(progress.samples)
                break
        else:
            self._check_not_empty()
        self.timers.enter("epoch end", progress.step)
        if self.state.open_epoch.steps and not self.history.preempted:  # The resumed run closes the interval.
            self._end_interval()
        return complete

    def _check_length(self) -> None:
        """Raise a UserError for an epoch of another length than that by which a schedule was planned."""
        if self.feed.source.is_map and self.feed.num_read is None and self.config.max_steps is None:
            raise UserError(
                "its sampler has no end, and with it the first epoch",
                field="max_steps",
                remedy="Set max_steps, or give the sampler an end",
            )
        planned, found = self.planned_samples, self.feed.num_read
        if self.progress.samples or None in (planned, found, self.total_steps) or planned == found:
            return
        if self.schedule.has_end:
            raise UserError(
                f"epoch {self.progress.epoch} has another number of samples than the data at the"
                " start, by which the schedule of the learning rate was planned",
                field="train_loader",
                got=f"{found} samples",
                allowed=f"{planned}, the length at the start",
                remedy="Give max_steps, or a scheduler whose rates do not depend on the length of the run",
            )

    def _after_step(self, record: StepRecord) -> None:
        """Whatever is due after an optimizer step: callbacks, log, signals, checkpoint."""
        save_every, timers = self.config.checkpoint.every_n_steps, self.timers
        self.records.add(record)
        self.callbacks.check_first_step()
        if self.callbacks.on_step:
            self.callbacks.notify("on_step_end")
        if record.logged:
            timers.enter("record")
            self._end_interval(record.norm)
        elif record.step >= self.consensus.next_check and record.step != self.goal.step:
            self.consensus.agree_on_signals()
        if self.history.stop_reason or record.step == self.goal.step:
            return  # this state, or that of the epoch's end, is saved in a moment
        if save_every and record.step % save_every == 0 and not self.feed.ended(self.progress.samples):
            mark = perf_counter()
            timers.enter("save")
            self.saver.save_if_due(epoch_end=False)
            timers.add("save", perf_counter() - mark)
        elif not self.saver.reserved:
            self.saver.reserve()

    def _end_interval(self, norm: Any = None) -> None:
        """Reduce, log and decide on equal numbers. Collective."""
        reduced = self.records.reduce(self.saver.has_finished(), *self.consensus.wishes)
        if reduced.saved:
            self.saver.finish()
        self.records.check_replicas(reduced)
        self.records.check_settings(reduced)
        self.consensus.apply(reduced.stop, reduced.go, reduced.steps_per_second)
        record = self.records.close_interval(reduced, norm)
        self.callbacks.notify("on_log", record)
        self.trackers.log_metrics(record, self.progress.step)
        self.records.begin_interval()

    def _end_epoch(self, metrics: dict[str, float], complete: bool) -> None:
        """Decide on equal metrics, step the epoch's scheduler, save, report."""
        self.timers.enter("epoch end")
        metrics = self.backend.broadcast_object(metrics)
        if complete:
            self.progress.epoch += 1
            self.progress.samples = 0
            self.schedule.after_epoch(metrics, self.progress.epoch)
        self._keep_best_accuracy(metrics, complete)
        self.history.epochs.append(metrics)
        self.callbacks.notify("on_epoch_end" if complete else "on_incomplete_epoch", metrics)
        self.consensus.agree()
        self.records.note_meeting()
        self.trackers.log_epoch(metrics, self.progress.step)
        self.timers.enter("save")
        # A resumed run decides on the whole epoch, as one that was not cut.
        self.saver.save_if_due(epoch_end=True, metrics=metrics if complete else None)

    # -- beginning and end -----------------------------------------------------------

    def prepare(self) -> None:
        """Place model and optimizer on this rank and build the schedule. Collective."""
        self.backend.prepare(self.task)
        self.model, self.optimizer = unwrapped(self.backend.module), self.backend.optimizer
        self._given = hyperparameters(self.optimizer)
        self.state.keep_hyperparameters(hyperparameters(self.optimizer))
        if self.feed is not None:
            self.feed.deal(self.backend.fewest_samples)
        for feed in self.validator.feeds.values():
            # So that collectives of the model or a validation step meet on all ranks.
            feed.deal(1, joins=self.backend.copies_in_evaluation)
        self.schedule.build(self.task.scheduler, self.optimizer, self.config, self._extent())

    def _extent(self) -> Extent:
        """Length of the run, as schedules count it."""
        is_cut = self.config.max_steps is not None
        begun = self.progress.step if self.task.progress is not None else 0
        if self.feed is None or self.total_steps is None:
            return Extent(self.config.max_steps, begun=begun, is_cut=is_cut)
        per_epoch, batches = self.steps_per_epoch, None
        epochs = -(-self.total_steps // per_epoch) if per_epoch else None
        size = self.task.train_data.batch_size or self.config.batch_size
        if epochs and self.planned_samples and isinstance(size, int) and not is_cut:
            batches = epochs * -(-self.planned_samples // size)
        return Extent(self.total_steps, epochs, batches, begun, is_cut, bool(self.validator.feeds))

    def _start(self) -> None:
        """Everything before the first step: model, state, data, schedule, trackers."""
        task, config = self.task, self.config
        self.timers.enter("prepare")
        self.prepare()
        check_same_data(self.plan, self.backend, task)
        # Ranks that share a model draw the same numbers, such as dropout masks of what each has whole.
        seed_streams(mix(config.seed, self.world.data_parallel_rank), config.deterministic)
        if task.run_state:
            self._continue_fit(task.run_state)
        self.timers.enter("resume")
        self.callbacks.gather(continues=task.progress is not None)
        self.saver.prepare()
        if task.state_dir is None and task.given_dir is not None:
            self.resumer.take_given(task.given_dir)
        if task.state_dir is not None:
            self.resumer.load(task.state_dir, task.given_dir)
        elif task.progress is None and self.resumer.resume() and config.checkpoint.hyperparameters == "given":
            take_hyperparameters(self.optimizer, self.schedule.scheduler, self._given)
        self.history.best_accuracy = self.progress.best_accuracy
        self._share_settings()
        self.records.start()
        # Who calls `fit` again wants further steps; a restarted or resumed run only what is left of its own.
        self.consensus.start(further=task.progress is not None or config.checkpoint.continue_stopped)
        self._announce()

    def _share_settings(self) -> None:
        """Compare what must be equal on all ranks, and let callbacks and log steps check it from now on."""
        settings = self.backend.settings()
        if settings is not None:
            settings.watch([holder for holder in self._holders() if hasattr(holder[1], "__dict__")])
        self.callbacks.guard(settings)
        if settings is not None and self.world.size > 1:
            self.records.compare(settings)
            settings.check_equal(self.backend)

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """Objects of the script whose attributes decide how ranks train, with their names in words."""
        yield "the loss", self.task.loss_fn
        yield "training_step", self.task.training_step
        for name, source in (("training", self.task.train_data), *self.task.val_data.items()):
            yield f"the {name or 'validation'} data", getattr(source, "dataset", None)

    def _continue_fit(self, left: Mapping[str, Any]) -> None:
        """Continue from what an earlier `fit` in this process left."""
        self.resumer.continue_fit(left, self.task.scheduler)
        if self.schedule.scheduler is not None and left["snapshot"].common["scheduler"] is not None:
            # Building a scheduler sets the rate of its first step.
            for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
                group["lr"] = given["lr"]

    def _announce(self) -> None:
        """Report to the user, the trackers and the callbacks that the run begins here."""
        self._print_position()
        params = {
            **self.plan.batch.as_dict(),
            "world_size": self.world.size,
            "precision": self.plan.precision,
            "learning_rate": self.plan.learning_rate,
        }
        checkpoint = self.history.checkpoint
        place = run_position(self.plan, self.backend, self.progress, self.total_steps, checkpoint)
        training = self.state.name_run(self.backend, self.task.training)
        with same_streams():
            self.trackers.start(params, place, training)
        collect_as_usual()
        self.callbacks.begin()

    def _print_position(self) -> None:
        if self.world.rank != 0:
            return
        at, lines = self.progress, []
        if at.stop_reason is not None:
            lines.append(describe_stop(at))
        elif at.step:
            lines.append(f"continues at epoch {at.epoch}, sample {at.samples}, step {at.step}")
            if at.samples and self.feed.rereads:
                lines.append(f"the stream cannot restore its position: reads {at.samples} samples again")
        elif self.config.resume_from_checkpoint:
            lines.append(f"no checkpoint in {self.config.checkpoint_dir} yet: starts from the beginning")
        if at.stop_reason is None and self.goal.reached(at):
            lines.append("nothing is left to train: raise epochs or max_steps to train further")
        for line in lines:
            print_line(line, sys.stdout)

    def _report_checkpoint(self, path: str, step: int) -> None:
        self.callbacks.notify("on_checkpoint", path)
        self.trackers.log_checkpoint(path, step)

    def _check_not_empty(self) -> None:
        if self.progress.samples == 0:
            raise UserError(
                "the data yielded no sample in an epoch"
                + (", because drop_last drops the only global batch" if self.feed.drop_last else ""),
                field="train_loader",
                got=f"{type(self.task.train_data.dataset).__name__}",
                allowed="at least one sample",
                remedy=f"Use a global batch of at most its length (now {self.feed.global_batch_size})"
                if self.feed.drop_last
                else "Check the source it reads from, and that each iter() of it starts at the first sample",
            )

    def _keep_best_accuracy(self, metrics: Mapping[str, float], complete: bool) -> None:
        accuracy = metrics.get("val_accuracy")
        if accuracy is not None:
            best = self.progress.best_accuracy
            self.history.best_accuracy = accuracy if best is None else max(best, accuracy)
            if complete:
                self.progress.best_accuracy = self.history.best_accuracy

    def leftover_state(self) -> dict[str, Any]:
        """What a later `fit` in this process needs besides the model."""
        return {
            "optimizer": self.optimizer,
            "scaler": self.backend.scaler_state(),
            "backend": self.backend.leftover_state(),
            "snapshot": self.state.capture(),
            "best_checkpoint": self.history.best_checkpoint,
        }


def _check_slices(plan: RunPlan, backend: Backend) -> None:
    slices = backend.world.data_parallel_size * backend.world.num_replicas
    if slices != plan.batch.data_parallel_size:
        raise ValueError(
            f"backend '{plan.spec.name}' cuts a global batch into {slices} slices"
            f" and its spec states {plan.batch.data_parallel_size}"
        )
