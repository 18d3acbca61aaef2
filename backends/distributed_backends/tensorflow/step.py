"""The compiled parts of a step: accumulate a micro-batch, sum over replicas, update, evaluate.

Gradients of sums of losses are accumulated in a variable per weight, which every replica has to
itself; the step sums them over all replicas of all ranks in one collective per dtype, the count of
samples or tokens riding along (C2), clips once by the global norm (C6), and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf


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
    """

    def __init__(self, strategy: Any, model: Any, optimizer: Any, objective: Any, seeds: list[Any]) -> None:
        self.strategy, self.model, self.optimizer, self.objective = strategy, model, optimizer, objective
        self.variables = list(model.trainable_variables)
        self._seeds = seeds
        self._used: set[int] = set()
        with strategy.scope():
            self._sums = [_own(tf.zeros(v.shape, v.dtype)) for v in self.variables]
            self._loss, self._count = _own(tf.zeros((), tf.float64)), _own(tf.zeros((), tf.float64))
        # The user's own code is converted where it is called: all of this would take seconds.
        self._accumulate = tf.function(self._accumulate_everywhere, reduce_retracing=True, autograph=False)
        self._evaluate = tf.function(self._evaluate_everywhere, reduce_retracing=True, autograph=False)
        self._steps: dict[Any, Any] = {}

    # -- called by the backend ---------------------------------------------------------

    def accumulate(self, batch: Any, numbers: Any, scale: float, seed: Any) -> tuple[Any, Any]:
        """Forward and backward of a micro-batch; (loss sum, count) of this rank's window so far.

        Args:
            batch: nested tensors, per replica.
            numbers: samples that count, per replica.
            scale: factor on the sum of losses.
            seed: (2,) uint32 for the random layers, or None to continue their state.
        """
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
        self._compiled("update")()

    def forget(self) -> None:
        """Drop the results of `finish`: the step is skipped."""
        self._compiled("forget")()

    def evaluate(self, batch: Any, numbers: Any) -> dict[str, tuple[Any, Any]]:
        """``{name: (sum, count)}`` of this rank."""
        found: dict[str, tuple[Any, Any]] = self._evaluate(batch, numbers)
        return found

    # -- compiled ----------------------------------------------------------------------

    def _compiled(self, name: str, *options: Any) -> Callable[..., Any]:
        used = tuple(sorted(self._used))
        key = (name, options, used)
        if key not in self._steps:

            def call(*args: Any) -> Any:
                replica = {"finish": self._finish, "update": self._apply, "forget": self._clear}[name]
                results = self.strategy.run(replica, args=(*args, *options, used))
                return None if results is None else self._first(results)

            self._steps[key] = tf.function(call, autograph=False)
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
        gradients = tape.gradient(scaled, [v.value for v in self.variables])
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._used.add(index)
                self._sums[index].assign_add(tf.cast(tf.convert_to_tensor(gradient), self._sums[index].dtype))
        self._loss.assign_add(tf.cast(total, tf.float64))
        self._count.assign_add(tf.cast(count, tf.float64))
        return tf.identity(self._loss.read_value()), tf.identity(self._count.read_value())

    def _reseed(self, seed: Any) -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        for index, state in enumerate(self._seeds):
            first = tf.cast(seed, tf.int64) + replica * 2654435761 + index * 40503
            state.assign(tf.cast(tf.stack([first % 2**32, tf.zeros_like(first)]), state.dtype))

    def _finish(self, scale: Any, max_norm: Any, clip: bool, apply: bool, used: tuple[int, ...]) -> Any:
        sums, count = self._reduced(used)
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


def _norm(values: list[Any]) -> Any:
    """Global L2 norm, in float64."""
    if not values:
        return tf.zeros((), tf.float64)
    squares = [tf.reduce_sum(tf.square(tf.cast(value, _wide(value)))) for value in values]
    return tf.sqrt(tf.add_n([tf.cast(square, tf.float64) for square in squares]))


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
