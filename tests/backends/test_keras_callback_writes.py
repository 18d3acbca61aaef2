"""What a callback changes of a Keras model or its optimizer is trained on all ranks, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distributed import Callback
from distributed.errors import UserError, WorkerError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.backends.test_keras_between_fits import EXACT, NUM, PLACES, SIZE, Objects, X, Y
from tests.support.keras_float64 import float64

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow")
keras = pytest.importorskip("keras")

RANKS = ["processes", "horovod"]


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with float64():
        yield


def clamp(model: Any, optimizer: Any) -> None:
    for weight in model.trainable_variables:
        weight.assign(np.clip(np.asarray(weight), -0.2, 0.2))


def set_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.001


def jitter(model: Any, optimizer: Any) -> None:
    for weight in model.trainable_variables:
        weight.assign_add(tf.random.normal(weight.shape, dtype=weight.dtype) * 1e-3)


class Writes(Callback):
    """Changes the model or the optimizer after each step, on rank 0."""

    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        self.change = change

    def on_step_end(self, context: Context) -> None:
        self.change(context.model, context.optimizer)


class WritesEverywhere(Writes):
    all_ranks = True


def train(callback: Callback, place: str, pool: RankPool) -> Objects:
    own = Objects()
    run = own.trainer(pool, place)
    run.callbacks = [callback]
    run.fit((X, Y))
    return own


@pytest.mark.parametrize("change", [clamp, set_rate])
@pytest.mark.parametrize("place", RANKS)
def test_a_change_on_rank_zero_is_refused(change: Any, place: str, rank_pool: RankPool) -> None:
    what = "the values of" if change is clamp else "'lr' of parameter group 0"
    with pytest.raises(UserError, match=f"Writes runs on rank 0 only and changed {what}"):
        train(Writes(change), place, rank_pool)


@pytest.mark.parametrize("change", [clamp, set_rate])
@pytest.mark.parametrize("place", PLACES)
def test_a_change_on_all_ranks_is_trained(change: Any, place: str, rank_pool: RankPool) -> None:
    oracle = Objects()
    weights = oracle.model.trainable_variables
    for i in range(0, NUM, SIZE):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((oracle.model(X[i : i + SIZE]) - Y[i : i + SIZE]) ** 2)
        oracle.optimizer.apply(tape.gradient(loss, weights), weights)
        if change is clamp:
            clamp(oracle.model, None)
        else:
            oracle.optimizer.learning_rate = 0.001
    assert train(WritesEverywhere(change), place, rank_pool).distance(oracle) < EXACT


@pytest.mark.parametrize("place", RANKS)
def test_a_change_that_differs_between_ranks_is_refused(place: str, rank_pool: RankPool) -> None:
    with pytest.raises(WorkerError, match=r"differs from the other ranks: after step 1"):
        train(WritesEverywhere(jitter), place, rank_pool)
