"""TensorFlowBackend: Keras models under the one loop, gradients summed by tf.distribute."""

from __future__ import annotations

import distributed_backends.tensorflow.import_tensorflow  # noqa: F401 - before TensorFlow itself

# isort: split
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from distributed.communication.process_group import GroupMixin, local_rank_of
from distributed.data.order import mix, share
from distributed.errors import UserError
from distributed.interfaces.backend import Backend, StepResult, Window
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.training.phase_timers import PhaseTimers
from distributed_backends.tensorflow.models import (
    PackedModel,
    PackedOptimizer,
    apply_precision,
    build_model,
    check_compiled,
    check_model,
    first_batch,
    is_foreign,
    seed_states,
    unpack,
    widest,
)
from distributed_backends.tensorflow.objective import Objective
from distributed_backends.tensorflow.optimizers import (
    RateHolder,
    build_optimizer,
    check_optimizer,
    has_schedule,
    in_width,
)
from distributed_backends.tensorflow.settings import KerasSettings
from distributed_backends.tensorflow.state import as_torch, export_keras, import_keras, named_variables
from distributed_backends.tensorflow.step import LossScale, StepFunctions, StepOptions, Taken
from distributed_backends.tensorflow.strategy import make_strategy
from distributed_backends.tensorflow.values import as_array, as_tensors, to_array, tupled


class TensorFlowBackend(GroupMixin, Backend):
    """Keras models: one process with a replica per device, or a process for each.

    Attributes:
        optimizer: learning rate in torch's form; its ``keras`` trains.
        scaler: loss scaler under fp16, else None.
        timers: seconds of forward and backward (one compiled call, counted as backward) and optimizer. Where
            one call takes the whole step, that is counted as backward too.
    """

    scaler: LossScale | None = None
    _original_optimizer: Any = None

    def __init__(self) -> None:
        self.timers = PhaseTimers()
        self._scale = 1.0
        self._iterations = 0
        self._numbers: dict[int, Any] = {}
        self._taken: Taken | None = None
        self._accumulated = False

    def setup(self, plan: RunPlan) -> World:
        self.config, self._batch, self._plan = plan.config, plan.batch, plan
        self.world = self.join(plan, "cpu" if plan.device == "cpu" else f"gpu:{local_rank_of(plan)}")
        if plan.config.deterministic:
            tf.config.experimental.enable_op_determinism()
        self.strategy = self.make_strategy(plan)
        if plan.precision == "fp16":
            self.scaler = LossScale(plan.config.scaler_init_scale, plan.config.scaler_growth_interval)
        self._checks_norm = self.scaler is not None or plan.config.on_nan == "skip"
        self._step_options = StepOptions(
            plan.config.gradient_clipping, plan.config.on_nan == "stop", self._checks_norm
        )
        return self.world

    def join(self, plan: RunPlan, device: str) -> World:
        """Meet the other ranks. Collective.

        Args:
            device: name of this rank's device.
        """
        return self.meet(plan, "gloo", device)

    def make_strategy(self, plan: RunPlan) -> Any:
        """The tf.distribute strategy over this rank's devices. Collective."""
        return make_strategy(plan, self.world, self.gather_objects)

    def make_functions(self) -> StepFunctions:
        """The compiled parts of a step, over the model and the optimizer that `prepare` has made."""
        return StepFunctions(
            self.strategy, self.module, self.optimizer.keras, self.objective, self._seed_states
        )

    # -- model and optimizer -------------------------------------------------------------

    def prepare(self, task: Task) -> None:
        seed = self.config.seed
        self._callers_seed = context.global_seed()
        # Layers without a seed of their own must begin in the same way on all ranks.
        tf.random.set_seed(seed)
        self._take_apart(task)
        with self.strategy.scope():
            self.module = build_model(
                self._given_model, seed, self._plan.precision, lambda: first_batch(task.train_data)
            )
            check_model(self.module)
            if not isinstance(self._given_model, (keras.Model, PackedModel)):
                check_compiled(self.module, task.optimizer, task.loss_fn or task.training_step)
            self._undo_precision = apply_precision(self.module, self._plan.precision)
            self.optimizer = self._holder()
        self._rate = self.optimizer.rate()
        self._follows_schedule = has_schedule(self.optimizer.keras)
        self._refuse_two_schedules(task)
        # The step sums gradients itself, once, before it clips them.
        self.optimizer.keras._all_reduce_sum_gradients = list
        self.objective = Objective(
            unpack(task.loss_fn),
            task.training_step,
            task.metrics and {name: unpack(metric) for name, metric in task.metrics.items()},
            task.validation_step,
        )
        self.objective.check(self.module)
        self._seed_states = seed_states(self.module)
        self._functions = self.make_functions()
        # Checking a loss inside the call waits for a GPU; between two calls the loop checks it where it must.
        waits = self.world.device != "cpu" and self._step_options.loss_stops
        self._takes_whole_steps = self._functions.alone and not waits
        tf.random.set_seed(mix(seed, self.world.rank) % 2**31)
        if task.run_state and self.scaler is not None:
            self.scaler.load_state_dict(task.run_state["scaler"])

    def _take_apart(self, task: Task) -> None:
        """Variables belong to the strategy they were made under: those of another are made again."""
        self._given_model, self._given_optimizer = task.model, task.optimizer
        self._original, self._asked_rate = None, self._plan.learning_rate
        if is_foreign(task.model, self.strategy):
            self._original, optimizer = task.model, task.optimizer
            build_model(task.model, self.config.seed, "fp32", lambda: first_batch(task.train_data))
            self._given_model = PackedModel.of(task.model)
            if isinstance(optimizer, RateHolder):
                self._asked_rate, optimizer = optimizer.param_groups[0]["lr"], optimizer.keras
            if isinstance(optimizer, keras.optimizers.Optimizer):
                self._original_optimizer = optimizer
                self._given_optimizer = PackedOptimizer.of(optimizer)

    def _holder(self) -> RateHolder:
        given = self._given_optimizer
        if isinstance(given, RateHolder):
            given.read_rate()
            return given
        with in_width(widest(self.module)):
            built = build_optimizer(unpack(given), self.module, self.config, self._plan.learning_rate)
            check_optimizer(built, self.module)
            built.build(self.module.trainable_variables)
        if isinstance(given, PackedOptimizer):
            given.fill(built)
        return RateHolder(built, self._asked_rate)

    def _refuse_two_schedules(self, task: Task) -> None:
        config = self.config
        ours = task.scheduler is not None or config.scheduler != "constant" or config.warmup_steps
        if self._follows_schedule and ours:
            raise UserError(
                "the optimizer carries a schedule of its own",
                field="scheduler",
                got=config.scheduler if task.scheduler is None else type(task.scheduler).__name__,
                allowed="no scheduler and no warmup_steps beside a LearningRateSchedule",
                remedy="Give the optimizer's class and a scheduler, or keep the optimizer's schedule alone",
            )

    # -- one step ------------------------------------------------------------------------

    def run_window(self, window: Window) -> tuple[Any, Any]:
        start = perf_counter()
        if self._takes_whole_steps and len(window.micro_batches) == 1:
            self._taken = taken = self._take(*window.micro_batches[0])
            self.timers.add("backward", perf_counter() - start)
            return taken.loss, taken.count
        if self._accumulated:  # a window that was given up, because its loss was not finite
            self._functions.forget()
        self._taken, self._accumulated = None, True
        # Sums of losses are scaled to the size of means, which half precision can hold.
        nominal = self._batch.global_batch_size
        self._scale = (self.scaler.scale if self.scaler else 1.0) / nominal
        result: tuple[Any, Any] = (0.0, 0.0)
        for position, (batch, number) in enumerate(window.micro_batches):
            parts, numbers = self._per_replica(batch, number)
            result = self._functions.accumulate(parts, numbers, self._scale, self._seed(position))
        self.timers.add("backward", perf_counter() - start)
        return result

    def _take(self, batch: Any, number: int) -> Taken:
        """The whole step, which `optimizer_step` then only reports."""
        self._write_rate()
        scale = tf.constant(self.scaler.scale, tf.float64) if self.scaler is not None else None
        return self._functions.take(
            as_tensors(batch), self._number(number), scale, self._seed(0), self._step_options
        )

    def _number(self, number: int) -> Any:
        if number not in self._numbers:
            self._numbers[number] = tf.constant(number)
        return self._numbers[number]

    def _seed(self, position: int) -> Any:
        """Random layers draw by (seed, rank, step, micro-batch), so that a resumed run draws the same.

        None without such layers.
        """
        if not self._seed_states:
            return None
        iterations = int(to_array(self.optimizer.keras.iterations)) if position == 0 else self._iterations
        self._iterations = iterations
        return tf.constant(mix(self.config.seed, self.world.rank, iterations, position) % 2**32, tf.int64)

    def _per_replica(self, batch: Any, number: int) -> tuple[Any, Any]:
        """The micro-batch as tensors, cut into a contiguous slice for each local replica."""
        size = self.world.num_replicas
        if size == 1:
            return as_tensors(batch), self._number(number)
        arrays = tf.nest.map_structure(as_array, tupled(batch))
        spans = [share(number, index, size) for index in range(size)]

        def cut(context: Any) -> Any:
            begin, end = spans[context.replica_id_in_sync_group]
            low, high = (begin, end) if end > begin else (0, 1)
            return tf.nest.map_structure(lambda array: tf.convert_to_tensor(array[low:high]), arrays)

        def count(context: Any) -> Any:
            begin, end = spans[context.replica_id_in_sync_group]
            return tf.constant(end - begin)

        distribute = self.strategy.experimental_distribute_values_from_function
        return distribute(cut), distribute(count)

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        start = perf_counter()
        if self._taken is not None:
            if max_norm != self._step_options.max_norm:
                raise ValueError(f"the step was clipped to {self._step_options.max_norm}, not to {max_norm}")
            norm, skipped = self._taken.norm, self._checks_norm and not bool(self._taken.finite)
        else:
            norm, skipped = self._finish(max_norm)
        if self.scaler is not None:
            self.scaler.update(skipped)
        if not skipped:
            self.optimizer.step()  # for torch's schedulers, which look whether it was called
        self.timers.add("optimizer", perf_counter() - start)
        return StepResult(norm, skipped)

    def _finish(self, max_norm: float | None) -> tuple[Any, bool]:
        """Update by what has accumulated; (norm, whether the step was skipped)."""
        self._accumulated = False
        self._write_rate()
        norm, finite = self._functions.finish(self._scale, max_norm, apply=not self._checks_norm)
        if not self._checks_norm:
            return norm, False
        if not bool(finite):
            self._functions.forget()
            return norm, True
        self._functions.update()
        return norm, False

    def _write_rate(self) -> None:
        if self._follows_schedule:
            self.optimizer.param_groups[0]["lr"] = self.optimizer.rate()
            return
        rate = self.optimizer.param_groups[0]["lr"]
        if rate != self._rate:
            with self.strategy.scope():
                self.optimizer.keras.learning_rate = rate
            self._rate = rate

    # -- evaluation ----------------------------------------------------------------------

    def set_training(self, training: bool) -> None:
        """Every call passes its mode. Evaluation uses the saved statistics: rank 0's."""
        if training or self.world.size * self.world.num_replicas == 1:
            return
        seeds = {id(state) for state in seed_states(self.module)}
        statistics = [v for v in self.module.non_trainable_variables if id(v) not in seeds]
        if statistics:
            # Of one that replicas mirror, an array is the first replica's.
            arrays = self.broadcast_object([to_array(v) for v in statistics])
            with self.strategy.scope():
                for variable, value in zip(statistics, arrays, strict=True):
                    variable.assign(value)

    def evaluate_window(self, window: Window) -> dict[str, tuple[Any, Any]]:
        found: dict[str, tuple[Any, Any]] = {}
        for batch, number in window.micro_batches:
            terms = self._functions.evaluate(*self._per_replica(batch, number))
            for name, (total, count) in terms.items():
                before = found.get(name, (0.0, 0.0))
                found[name] = (before[0] + float(total), before[1] + float(count))
        return found

    # -- what callbacks may change -------------------------------------------------------

    trains_copies = False

    def settings(self) -> KerasSettings:
        return KerasSettings(self, self.module, self.optimizer)

    def held_weights(self) -> dict[str, Any]:
        return {name: as_torch(variable) for name, variable in named_variables(self.module).items()}

    def replicated(self) -> dict[str, Any]:
        trained = {id(variable) for variable in self.module.trainable_variables}
        named = named_variables(self.module).items()
        return {name: as_torch(variable) for name, variable in named if id(variable) in trained}

    def callback_scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- state ---------------------------------------------------------------------------

    def export_state(self) -> BackendState:
        return export_keras(
            self.module, self.optimizer, self.scaler_state(), self.world.rank, self.world.size
        )

    def import_state(self, reader: StateReader) -> None:
        with self.strategy.scope():
            import_keras(reader, self.module, self.optimizer)
        self._rate = math.nan
        if self.scaler is not None and reader.scaler:
            self.scaler.load_state_dict(reader.scaler)

    def scaler_state(self) -> dict[str, Any] | None:
        return self.scaler.state_dict() if self.scaler is not None else None

    def release(self) -> None:
        tf.random.set_seed(self._callers_seed)
        self._undo_precision()
        self.optimizer.keras.__dict__.pop("_all_reduce_sum_gradients", None)
        if self._original is not None:
            _copy(self.module.variables, self._original.variables)
            if self._original_optimizer is not None:
                with self._original.distribute_strategy.scope():
                    self._original_optimizer.build(self._original.trainable_variables)
                    _copy(self.optimizer.keras.variables, self._original_optimizer.variables)
                self.optimizer.keras = self._original_optimizer
                self.optimizer.write_rate()
                return
        with self.strategy.scope():
            self.optimizer.write_rate()


def _copy(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        other.assign(to_array(own))
