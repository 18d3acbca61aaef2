"""The compiled parts of a step: accumulate a micro-batch, sum over replicas, update, evaluate.

Gradients of sums of losses are accumulated in a variable per weight, which every replica has to
itself; the step sums them over all replicas of all ranks in one collective per dtype, the count of
samples or tokens riding along (C2), clips once by the global norm (C6), and updates.

A window of a single micro-batch on a single replica needs neither variables nor a collective: there,
forward, backward, weighting, clipping, checks and update are one compiled function (`StepFunctions.take`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from distributed_backends.tensorflow.compiled import Compiled


class Taken(NamedTuple):
    """Result of a whole step: loss sum and count of its samples, and as in `Finished`."""

    loss: Any
    count: Any
    norm: Any
    finite: Any


class StepOptions(NamedTuple):
    """What a whole step does besides forward, backward and update.

    Attributes:
        max_norm: limit of the gradient's global norm, None without clipping.
        loss_stops: leave the weights as they are if the loss is not finite.
        norm_skips: leave the weights as they are if the norm is not finite.
    """

    max_norm: float | None
    loss_stops: bool
    norm_skips: bool


class Finished(NamedTuple):
    """Result of a step: the norm of the mean gradient before clipping, and whether it is finite."""

    norm: Any
    finite: Any


class StepFunctions:
    """Compiled functions over one model, optimizer and objective.

    Args:
        strategy: a tf.distribute strategy; the model and optimizer were built in its scope.
        model: a built Keras model.
        optimizer: a Keras optimizer, built over the model's trainable variables.
        objective: gives (sum, count).
        seeds: state variables of the model's random layers.

    Attributes:
        alone: there is a single replica, which can `take` a whole step.
    """

    def __init__(self, strategy: Any, model: Any, optimizer: Any, objective: Any, seeds: list[Any]) -> None:
        self.strategy, self.model, self.optimizer, self.objective = strategy, model, optimizer, objective
        self.variables = list(model.trainable_variables)
        self._seeds = seeds
        self._used: set[int] = set()
        self._num_taken_used = 0
        self._made: list[Any] = []
        with strategy.scope():
            self.alone = not tf.distribute.has_strategy()
        plain = not self.alone and len(strategy.extended.worker_devices) > 1
        # The user's own code is converted where it is called: all of this would take seconds.
        self._accumulate = Compiled(self._accumulate_everywhere, plain)
        self._evaluate = Compiled(self._evaluate_everywhere, plain)
        self._take = Compiled(self._take_a_step)
        self._steps: dict[Any, Any] = {}

    # -- called by the backend ---------------------------------------------------------

    def take(self, batch: Any, number: Any, scale: Any, seed: Any, options: StepOptions) -> Taken:
        """A step over a window of one micro-batch, in one call. Nothing is accumulated.

        Args:
            batch: nested tensors.
            number: samples that count.
            scale: loss scale, float64; None without one.
            seed: as for `accumulate`.
            options: constant in a run.
        """
        self._trace_again_if_more_is_used()
        taken = Taken(*self._take(batch, number, scale, seed, tuple(options)))
        self._trace_again_if_more_is_used()
        return taken

    def _trace_again_if_more_is_used(self) -> None:
        """A weight that any micro-batch has used moves in each step, as after accumulation."""
        if len(self._used) > self._num_taken_used:
            if self._num_taken_used:
                self._take.forget()
            self._num_taken_used = len(self._used)

    def accumulate(self, batch: Any, numbers: Any, scale: float, seed: Any) -> tuple[Any, Any]:
        """Forward and backward of a micro-batch; (loss sum, count) of this rank's window so far.

        Args:
            batch: nested tensors, per replica.
            numbers: samples that count, per replica.
            scale: factor on the sum of losses.
            seed: (2,) uint32 for the random layers, or None to continue their state.
        """
        self._sums  # noqa: B018 - no variables can be made inside a trace
        result: tuple[Any, Any] = self._accumulate(batch, numbers, tf.constant(scale, tf.float64), seed)
        return result

    def finish(self, scale: float, max_norm: float | None, apply: bool) -> Finished:
        """Sum over all replicas, make the mean of it, clip; update at once if `apply`."""
        result: tuple[Any, Any] = self._compiled("finish", max_norm is not None, apply)(
            tf.constant(scale, tf.float64), tf.constant(max_norm or 0.0, tf.float64)
        )
        return Finished(*result)

    def update(self) -> None:
        """Move the weights by what `finish` left."""
        self._compiled("apply")()

    def forget(self) -> None:
        """Drop the results of `finish`: the step is skipped."""
        self._compiled("clear")()

    def evaluate(self, batch: Any, numbers: Any) -> dict[str, tuple[Any, Any]]:
        """``{name: (sum, count)}`` of this rank."""
        found: dict[str, tuple[Any, Any]] = self._evaluate(batch, numbers)
        return found

    # -- accumulators ------------------------------------------------------------------

    @property
    def _sums(self) -> list[Any]:
        """A sum per weight."""
        return self._accumulators()[2:]

    @property
    def _loss(self) -> Any:
        return self._accumulators()[0]

    @property
    def _count(self) -> Any:
        return self._accumulators()[1]

    def _accumulators(self) -> list[Any]:
        """Loss, count, and a sum per weight: made by the first micro-batch that is accumulated."""
        if not self._made:
            with self.strategy.scope():
                self._made = [_own(tf.zeros((), tf.float64)) for _ in range(2)]
                self._made += [_own(tf.zeros(v.shape, v.dtype)) for v in self.variables]
        return self._made

    # -- compiled ----------------------------------------------------------------------

    def _take_a_step(self, batch: Any, number: Any, scale: Any, seed: Any, options: Any) -> Taken:
        max_norm, loss_stops, norm_skips = options
        if seed is not None:
            self._reseed(seed)
        with tf.GradientTape() as tape:
            total, count = self.objective(self.model, batch, number, True)
            counted = tf.cast(count, tf.float64)
            # As a factor of the loss, it saves a pass over all gradients.
            scaled = total * tf.cast(self._weight(counted, scale), total.dtype)
        gradients = self._gradients(tape, scaled)
        used = tuple(sorted(self._used))
        sums = [_or_zero(gradients[index], self.variables[index]) for index in used]
        norm = _norm(sums) if scale is None else _norm(sums) / scale
        means = self._clipped(sums, norm, scale, max_norm)
        finite = tf.math.is_finite(norm)
        checks = [finite] * norm_skips + [tf.math.is_finite(total)] * loss_stops
        if checks:
            good = checks[0] if len(checks) == 1 else tf.logical_and(*checks)
            tf.cond(good, lambda: self._move(means, used), lambda: None)
        else:
            self._move(means, used)
        return Taken(tf.cast(total, tf.float64), counted, norm, finite)

    def _weight(self, count: Any, scale: Any) -> Any:
        """Factor of the sum of losses: its gradient is then the mean's, by the loss scale."""
        return tf.math.divide_no_nan(tf.ones_like(count) if scale is None else scale, count)

    def _clipped(self, sums: list[Any], norm: Any, scale: Any, max_norm: Any) -> list[Any]:
        """Gradients without the loss scale, clipped."""
        factor = tf.ones_like(norm) if scale is None else 1.0 / scale
        if max_norm is not None:
            factor *= tf.minimum(max_norm / (norm + 1e-6), tf.ones_like(norm))
        elif scale is None:
            return sums
        return [value * tf.cast(factor, value.dtype) for value in sums]

    def _gradients(self, tape: Any, scaled: Any) -> list[Any]:
        """Dense gradients in the widths of the weights; None of a weight that was not used."""
        found: list[Any] = []
        for index, gradient in enumerate(tape.gradient(scaled, [v.value for v in self.variables])):
            if gradient is not None:
                self._used.add(index)
                gradient = tf.cast(tf.convert_to_tensor(gradient), self.variables[index].dtype)
            found.append(gradient)
        return found

    def _compiled(self, name: str, *options: Any) -> Callable[..., Any]:
        """The method ``_name`` on every replica; called with arguments, `options` and the weights in use."""
        used = tuple(sorted(self._used))
        key = (name, options, used)
        if key not in self._steps:

            def call(*args: Any) -> Any:
                results = self.strategy.run(getattr(self, f"_{name}"), args=(*args, *options, used))
                return None if results is None else self._first(results)

            self._steps[key] = Compiled(call)
        return self._steps[key]  # type: ignore[no-any-return]

    def _accumulate_everywhere(self, batch: Any, numbers: Any, scale: Any, seed: Any) -> tuple[Any, Any]:
        loss, count = self.strategy.run(self._one_micro_batch, args=(batch, numbers, scale, seed))
        return self._total(loss), self._total(count)

    def _one_micro_batch(self, batch: Any, number: Any, scale: Any, seed: Any) -> tuple[Any, Any]:
        if seed is not None:
            self._reseed(seed)
        with tf.GradientTape() as tape:
            total, count = self.objective(self.model, batch, number, True)
            scaled = total * tf.cast(scale, total.dtype)
        sums = self._sums
        for index, gradient in enumerate(self._gradients(tape, scaled)):
            if gradient is not None:
                sums[index].assign_add(gradient)
        self._loss.assign_add(tf.cast(total, tf.float64))
        self._count.assign_add(tf.cast(count, tf.float64))
        return tf.identity(self._loss.read_value()), tf.identity(self._count.read_value())

    def _reseed(self, seed: Any) -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        for index, state in enumerate(self._seeds):
            first = tf.cast(seed, tf.int64) + replica * 2654435761 + index * 40503
            state.assign(tf.cast(tf.stack([first % 2**32, tf.zeros_like(first)]), state.dtype))

    def _finish(self, scale: Any, max_norm: Any, clip: bool, apply: bool, used: tuple[int, ...]) -> Any:
        return self._finish_with(*self._reduced(used), scale, max_norm, clip, apply, used)

    def _finish_with(
        self, sums: list[Any], count: Any, scale: Any, max_norm: Any, clip: bool, apply: bool, used: Any
    ) -> Any:
        """`_finish` with the summed gradients of the weights in use, and the summed count."""
        factor = tf.where(count > 0, 1.0 / (tf.maximum(count, 1e-300) * scale), tf.zeros_like(count))
        norm = _norm(sums) * factor
        if clip:
            factor *= tf.minimum(max_norm / (norm + 1e-6), tf.ones_like(norm))
        means = [value * tf.cast(factor, value.dtype) for value in sums]
        if apply:
            self._move(means, used)
            self._clear(used)
        else:
            for index, value in zip(used, means, strict=True):
                self._sums[index].assign(value)
        return norm, tf.math.is_finite(norm)

    def _apply(self, used: tuple[int, ...]) -> None:
        self._move([self._sums[index].read_value() for index in used], used)
        self._clear(used)

    def _move(self, gradients: list[Any], used: tuple[int, ...]) -> None:
        if gradients:
            self.optimizer.apply(gradients, [self.variables[index] for index in used])

    def _clear(self, used: tuple[int, ...]) -> None:
        for variable in [*(self._sums[index] for index in used), self._loss, self._count]:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def _reduced(self, used: tuple[int, ...]) -> tuple[list[Any], Any]:
        """(summed gradients, summed count), one collective per dtype."""
        values = [self._sums[index].read_value() for index in used]
        count = self._count.read_value()
        if self.strategy.num_replicas_in_sync == 1:
            return values, count
        dtypes = sorted({value.dtype.name for value in values})
        carrier = max(dtypes, key=lambda name: tf.as_dtype(name).size, default="float64")
        for name in dtypes or [carrier]:
            chosen = [i for i, value in enumerate(values) if value.dtype.name == name]
            flat = [tf.reshape(values[i], [-1]) for i in chosen]
            if name == carrier:
                flat.append(tf.cast(count, name)[None])
            whole = tf.distribute.get_replica_context().all_reduce("SUM", tf.concat(flat, 0))
            parts = tf.split(whole, [part.shape[0] for part in flat])
            if name == carrier:
                count = tf.cast(parts[-1][0], tf.float64)
            for i, part in zip(chosen, parts, strict=False):
                values[i] = tf.reshape(part, values[i].shape)
        return values, count

    def _evaluate_everywhere(self, batch: Any, numbers: Any) -> dict[str, tuple[Any, Any]]:
        found = self.strategy.run(self._one_evaluation, args=(batch, numbers))
        return {name: (self._total(total), self._total(count)) for name, (total, count) in found.items()}

    def _one_evaluation(self, batch: Any, number: Any) -> dict[str, tuple[Any, Any]]:
        found = self.objective.evaluate(self.model, batch, number)
        return {name: (tf.cast(t, tf.float64), tf.cast(c, tf.float64)) for name, (t, c) in found.items()}

    def _total(self, value: Any) -> Any:
        """The sum over this rank's own replicas."""
        return tf.add_n(list(self.strategy.experimental_local_results(value)))

    def _first(self, values: Any) -> Any:
        return tf.nest.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], values)


def _own(value: Any) -> Any:
    """A variable that every replica has to itself."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _or_zero(gradient: Any, variable: Any) -> Any:
    return tf.zeros(variable.shape, variable.dtype) if gradient is None else gradient


def _norm(values: list[Any]) -> Any:
    """Global L2 norm, in float64."""
    if not values:
        return tf.zeros((), tf.float64)
    halves = [tf.nn.l2_loss(tf.cast(value, _wide(value))) for value in values]
    same = len({half.dtype for half in halves}) == 1
    total = tf.add_n(halves if same else [tf.cast(half, tf.float64) for half in halves])
    return tf.sqrt(2.0 * tf.cast(total, tf.float64))


def _wide(value: Any) -> Any:
    return value.dtype if value.dtype in (tf.float32, tf.float64) else tf.float32


_GROWTH, _BACKOFF = 2.0, 0.5


class LossScale:
    """Halves after a step whose summed gradients overflowed, doubles after `interval` good ones.

    All ranks see the same sums and keep the same scale (C8). The saved form is torch's GradScaler's.

    Args:
        interval: good steps before it doubles.
    """

    def __init__(self, scale: float, interval: int) -> None:
        self.scale, self.interval, self._good = scale, interval, 0

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step."""
        if overflowed:
            self.scale, self._good = self.scale * _BACKOFF, 0
            return
        self._good += 1
        if self._good == self.interval:
            self.scale, self._good = self.scale * _GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """In the form of `torch.amp.GradScaler.state_dict`."""
        return {
            "scale": self.scale,
            "growth_factor": _GROWTH,
            "backoff_factor": _BACKOFF,
            "growth_interval": self.interval,
            "_growth_tracker": self._good,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.scale, self._good = float(state["scale"]), int(state["_growth_tracker"])
