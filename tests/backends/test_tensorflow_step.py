"""A TensorFlow step in one compiled call and in calls that accumulate: both train as a plain loop does."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from distributed import TensorFlowDistributedTrainer
from distributed.errors import UserError
from distributed.testing.reference_problem import problem
from distributed.testing.suite import EXACT
from tests.support.keras_float64 import float64

keras = pytest.importorskip("keras", reason="pip install tensorflow")
tf = pytest.importorskip("tensorflow")

from distributed_backends.tensorflow.compiled import Compiled  # noqa: E402 - only where TensorFlow is
from distributed_backends.tensorflow.step import StepFunctions, StepOptions  # noqa: E402

pytestmark = pytest.mark.slow

BATCH, MAX_NORM = 8, 0.7
PATHS = [pytest.param(1, id="one call"), pytest.param(2, id="accumulated")]


def build() -> Any:
    layers = [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(3, dtype="float64")]
    model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers])
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        variable.assign(np.sin(np.arange(size) + 1.0).reshape(variable.shape) / 2)
    return model


def momentum() -> Any:
    """Keras's own, in float64. Adam would hide a wrong weight: it divides by the gradient's size."""
    with float64():
        return keras.optimizers.SGD(0.2, momentum=0.9)


def masked(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of which every batch masks another number, and one batch all."""
    x, y = (part.numpy() for part in problem(length))
    y[np.random.default_rng(0).random(length) < 0.5] = -100
    y[BATCH : 2 * BATCH] = -100
    return x, y


def plain_loop(x: Any, y: Any, epochs: int = 1, max_norm: float = math.inf) -> list[np.ndarray]:
    """Keras by hand: mean over unmasked targets, clip by the global norm as torch does, apply."""
    model, optimizer = build(), momentum()
    for _ in range(epochs):
        for start in range(0, len(x), BATCH):
            inputs, target = x[start : start + BATCH], y[start : start + BATCH]
            kept = target >= 0
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(
                    np.where(kept, target, 0), model(inputs, training=True), from_logits=True
                )
                loss = tf.reduce_sum(losses * kept) / max(kept.sum(), 1)
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            norm = float(tf.linalg.global_norm(gradients))
            factor = min(max_norm / (norm + 1e-6), 1.0)
            optimizer.apply([g * factor for g in gradients], model.trainable_variables)
    return list(model.get_weights())


def trainer_of(model: Any, accumulation: int, **given: Any) -> Any:
    """The same global batches whatever the accumulation."""
    fields: dict[str, Any] = {"device": "cpu", "data.shuffle": False, "log_every_n_steps": 1, **given}
    fields |= {"batch_size": BATCH // accumulation, "gradient_accumulation_steps": accumulation}
    return TensorFlowDistributedTrainer(model, optimizer=momentum(), **fields)


def train(accumulation: int, data: tuple[Any, Any], epochs: int = 1, model: Any = None, **given: Any) -> Any:
    """The trainer after `fit`."""
    trainer = trainer_of(model or build(), accumulation, **given)
    trainer.history = trainer.fit(data, epochs=epochs)
    return trainer


def distance(one: Any, other: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


# -- the same weights ---------------------------------------------------------------------------


class Watched(StepFunctions):
    """Keeps its instances."""

    made: ClassVar[list[StepFunctions]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(self)


class WeighsByTheNominalBatch(StepFunctions):
    """Mutant: divides by the nominal batch, whatever number of targets is masked."""

    def _weight(self, count: Any, scale: Any) -> Any:
        return super()._weight(tf.constant(float(BATCH), tf.float64), scale)


class ClipsEveryGradient(StepFunctions):
    """Mutant: clips each gradient by its own norm."""

    def _clipped(self, sums: list[Any], norm: Any, scale: Any, max_norm: Any) -> list[Any]:
        return [tf.clip_by_norm(value, max_norm) for value in sums]


USED = "distributed_backends.tensorflow.backend.StepFunctions"


def test_both_ways_of_a_step_train_as_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged, masked and wholly masked batches, some clipped. The last window has a single micro-batch."""
    x, y = masked(26)
    expected = plain_loop(x, y, epochs=3, max_norm=MAX_NORM)
    monkeypatch.setattr(USED, Watched)
    for accumulation, num_accumulators in ((1, 0), (2, 6)):
        trainer = train(accumulation, (x, y), epochs=3, gradient_clipping=MAX_NORM)
        norms = [record["grad_norm"] for record in trainer.history.logs]
        assert len(norms) == 12
        assert sum(norm == 0 for norm in norms) == 3
        assert min(sum(0 < norm < MAX_NORM for norm in norms), sum(norm > MAX_NORM for norm in norms)) > 2
        assert distance(trainer.model.get_weights(), expected) < EXACT
        assert len(Watched.made.pop()._made) == num_accumulators


def test_the_comparison_with_a_plain_loop_detects_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the single call. Accumulation, which they do not touch, trains as it should."""
    x, y = masked(24)
    found = []
    for kind, accumulation, max_norm in (
        (WeighsByTheNominalBatch, 1, None),
        (ClipsEveryGradient, 1, 0.1),
        (ClipsEveryGradient, 2, 0.1),
    ):
        monkeypatch.setattr(USED, kind)
        trainer = train(accumulation, (x, y), gradient_clipping=max_norm)
        found.append(distance(trainer.model.get_weights(), plain_loop(x, y, max_norm=max_norm or math.inf)))
    assert min(found[:2]) > 1e-4
    assert found[2] < EXACT


def test_a_weight_that_only_some_batches_use_moves_as_after_accumulation() -> None:
    """With momentum, a weight moves in a step whose own gradient does not reach it."""
    after = []
    for whole in (True, False):
        model = build()
        x, y = (tf.constant(part.numpy()) for part in problem(8))

        def objective(model: Any, batch: Any, number: Any, training: bool) -> Any:
            hidden = model.layers[0](batch[0])
            output = hidden if len(batch) == 1 else model.layers[1](hidden)
            return tf.reduce_sum(tf.square(output)), number

        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        functions = StepFunctions(tf.distribute.get_strategy(), model, optimizer, objective, [])
        for batch in ((x,), (x, y), (x,), (x,), (x, y)):
            if whole:
                functions.take(batch, tf.constant(8), None, None, StepOptions(1.0, True, False))
            else:
                functions.accumulate(batch, tf.constant(8), 0.125, None)
                functions.finish(0.125, 1.0, apply=True)
        after.append(model.get_weights())
    assert distance(*after) < EXACT


# -- losses that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("accumulation", PATHS)
def test_a_loss_that_is_not_finite_reaches_no_weight(accumulation: int) -> None:
    x, y = (part.numpy() for part in problem(24))
    broken = x.copy()
    broken[10] = np.nan
    skipped = train(accumulation, (broken, y), on_nan="skip")
    assert skipped.history.num_skipped_steps == 1
    rest = [*range(8), *range(16, 24)]
    assert distance(skipped.model.get_weights(), plain_loop(x[rest], y[rest])) < EXACT

    model = build()
    with pytest.raises(UserError, match="the loss is nan at step 2") as caught:
        train(accumulation, (broken, y), model=model)
    assert caught.value.field == "on_nan"
    assert distance(model.get_weights(), plain_loop(x[:8], y[:8])) < EXACT


@pytest.mark.parametrize("accumulation", PATHS)
def test_a_loop_of_ones_own_continues_after_a_loss_that_is_not_finite(accumulation: int) -> None:
    """What the refused batch had accumulated is not part of the next step."""
    x, y = problem(16)
    trainer = trainer_of(build(), accumulation)
    trainer.train_step(x[:8], y[:8])
    with pytest.raises(UserError, match="the loss is nan"):
        trainer.train_step(x[8:] * torch.nan, y[8:])
    trainer.train_step(x[8:], y[8:])
    assert distance(trainer.model.get_weights(), plain_loop(x.numpy(), y.numpy())) < EXACT


# -- calls ---------------------------------------------------------------------------------------


def test_compiled_calls_match_plain_ones() -> None:
    """Nested structures whatever the order of their keys, constants, shapes that vary, results that nest."""
    traced: list[Any] = []

    def function(batch: Any, number: Any, power: Any) -> Any:
        traced.append(batch)
        first, (second, third) = batch["first"], batch["rest"]
        scaled = first - 2 * second if power is None else (first - 2 * second) ** power
        return {"sum": tf.reduce_sum(scaled) * third, "number": (number,)}

    compiled = Compiled(function)

    def check(length: int, power: Any, flipped: bool, kind: Any = dict) -> None:
        first, second, third = tf.range(1.0, length + 1), tf.ones(length), tf.constant(3.0)
        batch = {"first": first, "rest": [second, third]}
        if flipped:
            batch = dict(reversed(batch.items()))
        found = compiled(kind(batch), tf.constant(length), power)
        plain = function(batch, tf.constant(length), power)
        traced.pop()
        assert found["sum"].numpy() == pytest.approx(plain["sum"].numpy())
        assert int(found["number"][0]) == length

    for power in (None, 2.0):
        for flipped in (False, True):
            before = len(traced)
            for length in (3, 4, 5, 6, 7, 3, 4):
                check(length, power, flipped)
            assert len(traced) - before == 2  # the first shape, and any length
    check(5, None, False, UserDict)
    assert isinstance(traced[-1], UserDict)
    tf.config.run_functions_eagerly(True)
    try:
        before = len(traced)
        check(3, None, False)
        assert len(traced) == before + 1
    finally:
        tf.config.run_functions_eagerly(False)
