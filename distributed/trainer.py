"""Trainer: a model, a configuration, and `fit`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from distributed.communication.environment import detect
from distributed.config import DistributedConfig, Layer, load_layers
from distributed.config.load import config_layers, override
from distributed.config.paths import with_absolute_paths
from distributed.config.script_overlay import active
from distributed.errors import UserError, hide_own_frames, stopped_by
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.callback import Callback, listed
from distributed.interfaces.framework import Framework, framework_of
from distributed.interfaces.history import History
from distributed.interfaces.launcher import Launcher
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.planned_run import (
    before_run,
    choose_micro_batch,
    explain_memory,
    print_comparison,
)
from distributed.planner.backend_choice import BackendChoice, choose_backend
from distributed.planner.resolve import resolve
from distributed.registry.catalog import Catalog, get_catalog, load_target
from distributed.resilience.preemption import INTERRUPT
from distributed.system.garbage_collection import collect_as_usual
from distributed.system.output import print_line

if TYPE_CHECKING:
    from distributed.launch.run import RunResult


class Trainer:
    """Train a model by a `DistributedConfig`.

    Args:
        model: a ``torch.nn.Module`` (under ``tensorflow`` and ``horovod`` a Keras model), or a function
            without arguments that builds one.
        config: a `DistributedConfig`, a mapping, or the path of a YAML file.
        optimizer: an optimizer, its class (called with the parameters and
            ``lr=learning_rate``), a function from the model to an optimizer, or a name; None
            builds the config's.
        scheduler: a scheduler of that optimizer, or a function from the optimizer to one;
            or a name; None builds the config's. `scheduler_interval` sets when an object steps.
        loss_fn: ``(output, target) -> mean`` or ``(sum, count)``; None is cross-entropy with class indices.
        training_step: ``(model, batch) -> mean`` or ``(sum, count)``, instead of `loss_fn`.
        validation_step: ``(model, batch) -> {name: (sum, count)}``, instead of the loss and
            `metrics`.
        metrics: ``{name: (output, target) -> (sum, count)}`` for validation; None is accuracy
            where the loss is a cross-entropy.
        collate_fn: makes a batch of a list of samples, for a dataset that is given to `fit` without a
            DataLoader; see also ``data.num_workers``.
        callbacks: see `Callback`.
        fields: any field of `DistributedConfig`, e.g. ``batch_size=32``.

    Raises:
        UserError: a wrong field or value.
    """

    default_backend: str | None = None

    @hide_own_frames
    def __init__(
        self,
        model: Any,
        config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        training_step: Callable[..., Any] | None = None,
        validation_step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        callbacks: Sequence[Callback] = (),
        **fields: Any,
    ) -> None:
        collect_as_usual()  # frameworks are imported by now; what follows is the user's program
        # The config builds by name; an object or a factory is the user's own.
        if isinstance(optimizer, str):
            fields["optimizer"], optimizer = optimizer, None
        if isinstance(scheduler, str):
            fields["scheduler"], scheduler = scheduler, None
        self._model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loss_fn, self.training_step, self.validation_step = loss_fn, training_step, validation_step
        self.metrics, self.collate_fn, self.callbacks = metrics, collate_fn, listed(callbacks)
        self._layers = [*self._defaults(), *config_layers(config), Layer("argument", fields)]
        self.config = self._configure({})
        self.history: History | None = None
        self._outcome: RunResult | None = None
        self._optimizer_of_outcome: Any = None
        self._task_done: Task | None = None
        self._stepper: Any = None
        self._chosen: tuple[DistributedConfig, BackendChoice, Framework] | None = None
        self.launcher: Launcher | None = None
        """Starts the ranks instead of the backend's own launcher; for tests and embedding."""

    # -- configuration ---------------------------------------------------------------

    def _defaults(self) -> list[Layer]:
        name = self.default_backend
        return [Layer(f"default of {type(self).__name__}", {"backend": name})] if name else []

    def _configure(self, overrides: Mapping[str, Any]) -> DistributedConfig:
        script, given = active(), [*self._layers, Layer("fit", overrides)]
        return script.complete(load_layers([*given, *script.layers])) if script else load_layers(given)

    @property
    def framework(self) -> Framework:
        """Handles the models, optimizers and data of the chosen backend.

        Raises:
            UserError: no such backend, or what it needs is not installed.
        """
        return self._choose(self.config)[1]

    def _choose(self, config: DistributedConfig) -> tuple[BackendChoice, Framework]:
        """The backend of `config` and its framework, resolved once for each configuration."""
        if self._chosen is None or self._chosen[0] is not config:
            choice = choose_backend(config, get_catalog(), self._framework_of_objects())
            self._chosen = (config, choice, load_target(choice.spec.objects)())
        return self._chosen[1:]

    def _framework_of_objects(self) -> str | None:
        """Framework of what was given; None where functions build all of it."""
        given = (self._model, self.optimizer, self.loss_fn)
        return next(filter(None, map(framework_of, given)), None)

    @property
    def model(self) -> Any:
        """The model; built now, with the trained weights, when a factory was given."""
        if self._is_module() or self._outcome is None or self._outcome.state is None:
            return self._model
        assert self._task_done is not None
        self._model = self.framework.build(self._model, self.config.seed, self._task_done)
        self._take_weights(self._outcome)
        return self._model

    @property
    def best_accuracy(self) -> float | None:
        """Best validation accuracy so far, None before there was one."""
        return self.history.best_accuracy if self.history else None

    # -- training --------------------------------------------------------------------

    @hide_own_frames
    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        mlflow_experiment: str | None = None,
    ) -> History:
        """Train, and return the record; the model then holds the trained weights.

        A second `fit` continues where the first ended: optimizer, schedule, epoch and step
        count on, and `epochs` and `max_steps` are what it adds.

        Args:
            train_loader: a DataLoader, a Dataset, tensors, or a sequence of samples; under
                ``tensorflow`` also a ``tf.data.Dataset`` or ``keras.utils.PyDataset``.
            val_loader: the same for validation, or None. A mapping from names to such validates each set:
                metrics are ``val_<name>_loss`` and so on, and ``val_loss`` over the samples of all sets.
            epochs: overrides the config's.
            max_steps: overrides the config's.
            checkpoint_dir: overrides the config's.
            mlflow_experiment: records the run in this MLflow experiment.

        Raises:
            UserError: a mistake, before a process starts wherever it can be seen.
            WorkerError: a rank failed; holds its rank, host and traceback.
            Preempted: a signal has stopped the run, and the step is saved.
            KeyboardInterrupt: Ctrl-C has; the model holds the weights of that step.
        """
        started = perf_counter()
        overrides = {
            "epochs": epochs,
            "max_steps": max_steps,
            "checkpoint_dir": checkpoint_dir,
            "tracking.mlflow_experiment": mlflow_experiment,
        }
        config = self._configure({k: v for k, v in overrides.items() if v is not None})
        self.config = config
        task = self.task_of(config, train_loader, val_loader)
        catalog, script = get_catalog(), active()
        if script:
            script.num_fits += 1
            if script.examine is not None:
                script.examine(self, config, task, train_loader)
                raise SystemExit(0)
        plan = self._plan(config, catalog, task)
        if script and script.dry_run:
            print(plan.summary(), flush=True)
            # Code behind fit in a script needs metrics that a dry run does not have.
            raise SystemExit(0)
        return self._run(plan, task, catalog, started)

    def _run(self, plan: RunPlan, task: Task, catalog: Catalog, started: float) -> History:
        from distributed.launch import run
        from distributed.tracking.trackers import capture_contexts, check_trackers
        from distributed.training.unused_fields import warn_of_unused

        check_trackers(plan.config, catalog)
        earlier = self.history if task.progress is not None else None
        plan, choose = choose_micro_batch(plan, task, self.launcher, earlier)
        if plan.joined is None or plan.joined.rank == 0:
            warn_of_unused(plan.config, task)
            print_line(plan.summary(), sys.stdout)
        catalog.manager.hook.on_run_start(plan=plan)
        given, room = before_run(plan, task)

        def replan(fields: Mapping[str, Any]) -> RunPlan:
            return self._plan(override(plan.config, fields, "changed"), catalog, task)

        try:
            outcome = run.run(plan, task, capture_contexts(plan.config, catalog), self.launcher, choose)
        except BaseException as error:
            try:
                explain_memory(error, plan, given, catalog, replan, room, choose)
            finally:
                catalog.manager.hook.on_run_end(plan=plan, history=None, error=error)
            raise
        history = outcome.history
        history.total_time = perf_counter() - started
        print_comparison(plan, history)
        lost = outcome.lost_state()
        catalog.manager.hook.on_run_end(plan=plan, history=history, error=lost)
        if lost is not None:
            self.history = history
            raise lost
        if history.preempted in (None, INTERRUPT.name):
            self._adopt(outcome, plan.config)
        if history.preempted:
            raise self._stopped(history, outcome, plan)
        return history

    def _stopped(self, history: History, outcome: RunResult, plan: RunPlan) -> BaseException:
        self.history = history
        gone = stopped_by(history.preempted or "", outcome.progress.step, history.checkpoint or "")
        if plan.joined is None or plan.joined.rank == 0:
            print_line(gone, sys.stdout)
        return gone

    def task_of(self, config: DistributedConfig, train_loader: Any, val_loader: Any) -> Task:
        """What `fit` trains under `config`, before it is sent to ranks.

        Raises:
            UserError: arguments that contradict each other, or data that cannot be split over ranks.
        """
        framework = self.framework
        framework.check(self._with_loss(), self.optimizer)
        self._check_unused()

        from distributed.data import Source, validation_sources

        train_data = framework.read(train_loader, "train_loader", config)
        reading: dict[str, Any] = {"collate_fn": self.collate_fn, "options": config.data.loader_options}
        task = self._bare_task(
            validation_step=self.validation_step,
            metrics=self.metrics,
            train_data=Source.of(train_data, "train_loader", config.data.shuffle, **reading),
            val_data=validation_sources(
                val_loader, lambda data, argument: framework.read(data, argument, config), **reading
            ),
            callbacks=self.callbacks,
        )
        task = framework.complete(task)
        if not self._is_module():
            # A factory's model may need data to know its shapes.
            self._task_done = task
        return self._continued(task)

    def _check_unused(self) -> None:
        """Raise a UserError for a metric or loss that another argument would replace in silence."""
        step = "validation_step" if self.validation_step is not None else "training_step"
        if self.metrics and getattr(self, step) is not None:
            raise UserError(
                f"metrics are computed from (output, target), which a {step} does not return, so they would"
                " be ignored",
                field="metrics",
                got=", ".join(map(str, self.metrics)),
                allowed=f"metrics without {step}",
                remedy="Return them from validation_step=lambda model, batch: {name: (sum, count)}",
            )
        if self.loss_fn is not None and self.training_step is not None:
            raise UserError(
                "training_step computes the loss itself, so loss_fn would be ignored",
                field="loss_fn",
                got=getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__),
                allowed="either loss_fn or training_step",
                remedy="Leave one of them out",
            )

    def _continued(self, task: Task) -> Task:
        """Let a second `fit` begin where the first ended."""
        before = self._outcome
        if before is None:
            return task
        task.progress = before.progress
        if before.state is not None:
            task.state_dir, task.held = _newest(before), before.held
            if task.held is not None and self.optimizer is not self._optimizer_of_outcome:
                task.held = {**task.held, "optimizer": None}  # another one was assigned
            if task.state_dir is None:
                raise UserError(
                    "a second fit() needs the weights of the first, and return_weights='none' discarded them",
                    field="return_weights",
                    got="none",
                    allowed="auto, full",
                    remedy="Or save checkpoints and start a new Trainer with resume_from_checkpoint=True",
                )
        elif before.run_state is not None:
            if self.optimizer is self._optimizer_of_outcome:
                task.optimizer = before.run_state["optimizer"]
            task.run_state = before.run_state
        return task

    def _plan(self, config: DistributedConfig, catalog: Catalog, task: Task) -> RunPlan:
        choice, framework = self._choose(config)
        choice = replace(choice, config=with_absolute_paths(choice.config))
        facts = self.facts_of(task)
        joined = detect(os.environ) if config.launch in ("auto", "join") else None
        resources = self._resources(choice.spec, framework, config, joined)
        plan = resolve(config, catalog, facts, resources, joined, choice)
        framework.check_split(self._model, plan)
        return plan

    def facts_of(self, task: Task) -> Facts:
        """What the planner needs to know of the objects of `task`."""
        return Facts(
            train_batch_size=self._loader_batch_size(task),
            val_batch_size=next((s.batch_size for s in task.val_data.values() if s.batch_size), None),
            num_samples=task.train_data.length if task.train_data else None,
            has_optimizer=self.framework.carries_rate(self._model, self.optimizer),
            drop_last=bool(task.train_data and task.train_data.drop_last),
            has_batches=bool(task.train_data and task.train_data.order == "batch_sampler"),
        )

    def _loader_batch_size(self, task: Task) -> int | None:
        """The training loader's own batch size, unless a search has sampled another."""
        run = active()
        sampled = run is not None and "batch_size" in run.sampled
        return None if sampled or task.train_data is None else task.train_data.batch_size

    def _resources(
        self,
        spec: BackendSpec,
        framework: Framework,
        config: DistributedConfig,
        joined: LauncherEnvironment | None,
    ) -> Resources:
        if config.device == "cpu":
            return Resources(0)
        elsewhere = None
        if spec.remote and joined is None:
            elsewhere = (self.launcher or load_target(spec.launcher)()).num_gpus(config)
        return Resources(framework.num_gpus() if elsewhere is None else elsewhere)

    # -- afterwards ------------------------------------------------------------------

    def _adopt(self, outcome: RunResult, config: DistributedConfig) -> None:
        """Keep what the next `fit` needs, and put the weights into the caller's model."""
        before, self._outcome = self._outcome, outcome
        self._optimizer_of_outcome = self.optimizer
        self.history = outcome.history
        if outcome.loop is not None:
            self._model = outcome.loop.model if not self._is_module() else self._model
        elif self._is_module() and config.return_weights != "none":
            self._take_state(outcome)
        if before is not None and before.state is not None and before.state is not outcome.state:
            before.state.cleanup()

    def _take_state(self, outcome: RunResult) -> None:
        from distributed.checkpoint.reader import PortableReader
        from distributed.launch.caller_objects import take_back

        path = _newest(outcome)
        assert path is not None
        outcome.held = take_back(PortableReader(path), self._bare_task(), self.framework)

    def _take_weights(self, outcome: RunResult) -> None:
        from distributed.checkpoint.reader import PortableReader

        path = _newest(outcome)
        assert path is not None
        self.framework.load_weights(PortableReader(path), self._with_loss())

    def _with_loss(self) -> Any:
        """The model, with the loss where that has parameters of its own."""
        if framework_of(self.loss_fn) != "torch":
            return self._model
        from distributed.training.loss_parameters import with_loss

        return with_loss(self._model, self.loss_fn)

    def _is_module(self) -> bool:
        return self.framework.is_model(self._model)

    # -- for people with their own loop --------------------------------------------------

    @hide_own_frames
    def train_step(self, data: Any, target: Any) -> float:
        """One optimizer step on this rank's batch, for a loop of your own.

        The batch is cut into `gradient_accumulation_steps` micro-batches, and the step uses
        the mean over the samples of all ranks, equal in number or not (C2). Under torchrun
        (or srun, mpirun) every rank calls this; started plainly, one rank trains here.

        Args:
            data: this rank's inputs, batch first.
            target: their targets, batch first.

        Returns:
            The mean loss of this rank's samples.

        Raises:
            UserError: the config asks for more ranks than a loop of your own can have here.
        """
        from distributed.training.manual_step import Stepper

        if self._stepper is None:
            catalog, task = get_catalog(), self._bare_task()
            self._stepper = Stepper(self._plan(self._configure({}), catalog, task), task, catalog)
        loss: float = self._stepper.step(data, target)
        return loss

    def _bare_task(self, **more: Any) -> Task:
        is_class = isinstance(self.scheduler, type)  # which seems to have the methods of its objects
        return Task(
            model=self._model,
            optimizer=self.optimizer,
            scheduler=partial(self.scheduler) if is_class else self.scheduler,
            loss_fn=self.loss_fn,
            training_step=self.training_step,
            **more,
        )


def _newest(outcome: RunResult) -> str | None:
    """The portable checkpoint in which started ranks left their final state, if they did."""
    assert outcome.state is not None
    if outcome.left.checkpoint is not None:
        return outcome.left.checkpoint
    return next(map(str, Path(outcome.state.name, "state").glob("step_*")), None)
