"""Changes of Keras models between two fits are trained, and objects hold what Keras leaves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from distributed import Trainer
from distributed.testing.rank_pool import RankPool
from tests.support.keras_float64 import float64
from tests.support.training import make_trainer

keras = pytest.importorskip("keras", reason="pip install tensorflow")
tf = pytest.importorskip("tensorflow")

NUM, SIZE, EXACT = 24, 6, 1e-12
X = np.random.default_rng(1).standard_normal((NUM, 3))
Y = np.sin(X.sum(1, keepdims=True))
PLACES = {
    "one": {"backend": "tensorflow"},
    "mirrored": {"backend": "tensorflow", "num_gpus": 2, "num_processes": None},
    "processes": {"backend": "tensorflow", "num_processes": 2},
    "horovod": {"backend": "horovod", "num_processes": 2},
}
everywhere = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64():
        yield


class Objects:
    """A model and its optimizer, as a script makes them."""

    def __init__(self, compiled: bool = False) -> None:
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [
                keras.Input((3,), dtype="float64"),
                keras.layers.Dense(4, activation="tanh", dtype="float64"),
                keras.layers.Dense(1, dtype="float64"),
            ]
        )
        self.optimizer, self.compiled = keras.optimizers.Adam(0.02), compiled
        if compiled:
            self.model.compile(self.optimizer, keras.losses.MeanSquaredError())

    def train_epoch(self) -> None:
        """An epoch of plain Keras."""
        for i in range(0, NUM, SIZE):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.model(X[i : i + SIZE]) - Y[i : i + SIZE]) ** 2)
            weights = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)

    def values(self) -> list[np.ndarray[Any, Any]]:
        """Weights, moments, steps and rate."""
        return [np.asarray(v) for v in (*self.model.variables, *self.optimizer.variables)]

    def distance(self, other: Objects) -> float:
        pairs = zip(self.values(), other.values(), strict=True)
        return max(float(np.abs(a.astype(float) - b.astype(float)).max()) for a, b in pairs)

    def trainer(self, pool: RankPool | None, place: str) -> Trainer:
        given = {} if self.compiled else {"optimizer": self.optimizer, "loss_fn": "mse"}
        fields = {"global_batch_size": SIZE, "data": {"shuffle": False}, "epochs": 1}
        return make_trainer(self.model, 1, pool, **{**given, **fields, **PLACES[place]})


def scale_weights(objects: Objects) -> None:
    objects.model.layers[0].kernel.assign(objects.model.layers[0].kernel * 0.5)


def set_weights(objects: Objects) -> None:
    objects.model.set_weights([weight + np.sin(weight) for weight in objects.model.get_weights()])


def set_rate(objects: Objects) -> None:
    objects.optimizer.learning_rate = 0.003


def set_beta(objects: Objects) -> None:
    objects.optimizer.beta_1 = 0.5


def scale_moment(objects: Objects) -> None:
    moment = objects.optimizer.variables[2]
    moment.assign(moment * 3.0)


def clear_state(objects: Objects) -> None:
    for variable in objects.optimizer.variables:
        if variable is not objects.optimizer.learning_rate:
            variable.assign(np.zeros(variable.shape, variable.dtype))


def nothing(objects: Objects) -> None:
    """Leaves all as it is."""


CHANGES: list[Callable[[Objects], None]] = [
    nothing, scale_weights, set_weights, set_rate, set_beta, scale_moment, clear_state, nothing
]  # fmt: skip


@everywhere
def test_a_change_between_two_fits_is_trained(place: str, rank_pool: RankPool) -> None:
    oracle, own = Objects(), Objects()
    run, distances = own.trainer(rank_pool, place), {}
    for change in CHANGES:
        change(oracle)
        change(own)
        oracle.train_epoch()
        run.fit((X, Y))
        distances[change.__name__] = own.distance(oracle)
    assert max(distances.values()) < EXACT, distances


@everywhere
@pytest.mark.parametrize("compiled", [False, True], ids=["given", "compiled"])
def test_an_optimizer_is_carried_on_to_another_trainer(
    compiled: bool, place: str, rank_pool: RankPool
) -> None:
    oracle, own = Objects(), Objects(compiled)
    for _ in range(2):
        oracle.train_epoch()
        own.trainer(rank_pool, place).fit((X, Y))
    assert own.distance(oracle) < EXACT


@everywhere
def test_an_optimizer_is_carried_on_from_a_loop_of_the_script(place: str, rank_pool: RankPool) -> None:
    oracle, own = Objects(), Objects()
    oracle.train_epoch()
    oracle.train_epoch()
    own.train_epoch()
    own.trainer(rank_pool, place).fit((X, Y))
    assert own.distance(oracle) < EXACT
