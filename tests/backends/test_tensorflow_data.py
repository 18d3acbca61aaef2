"""tf.data, Keras datasets and nested arrays: every sample once, in an order that can be repeated."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from distributed import TensorFlowDistributedTrainer, Trainer, UserError, WorkerError
from distributed.config import DistributedConfig
from distributed.data import Source
from distributed.testing.oracle import oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import problem, small_model
from distributed.testing.suite import EXACT
from tests.support.training import make_trainer

keras = pytest.importorskip("keras", reason="pip install tensorflow")
tf = pytest.importorskip("tensorflow")


@pytest.fixture(autouse=True)
def _no_global_seed() -> None:
    tf.random.set_seed(None)


def source_of(data: Any, argument: str = "train_loader", **fields: Any) -> Source:
    from distributed_backends.tensorflow.data import read_data

    config = DistributedConfig(backend="tensorflow", **fields)
    return Source.of(read_data(data, argument, config), argument, config.data.shuffle)


def order(source: Source, epoch: int) -> list[int]:
    source.dataset.set_epoch(epoch)
    return [int(sample) for sample in source.dataset]


def trainer_of(pool: RankPool, ranks: int, **given: Any) -> Trainer:
    from distributed.testing.tensorflow_workbench import TensorFlowWorkbench

    model = TensorFlowWorkbench().model(torch.float64)
    kind = TensorFlowDistributedTrainer
    return make_trainer(model, ranks, pool, kind=kind, optimizer="sgd", learning_rate=0.3, **given)


def off_the_oracle(trainer: Trainer, batch: int, steps: int, length: int = 25) -> float:
    from distributed.testing.tensorflow_workbench import TensorFlowWorkbench

    reference = small_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    oracle_fit(reference, optimizer, *problem(length), global_batch_size=batch, steps=steps, shuffle=False)
    weights = TensorFlowWorkbench().weights(trainer.model)
    pairs = zip(weights, reference.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def pipeline() -> Any:
    return tf.data.Dataset.from_tensor_slices(tuple(part.numpy() for part in problem(25)))


# -- order ------------------------------------------------------------------------------------


def test_an_unseeded_shuffle_is_given_a_seed_by_run_and_epoch() -> None:
    def make(seed: int = 0) -> Source:
        return source_of(tf.data.Dataset.range(20).shuffle(20).batch(4), seed=seed)

    first = make()
    assert sorted(order(first, 0)) == list(range(20))
    assert order(first, 0) == order(first, 0) == order(make(), 0)
    assert order(first, 0) != order(first, 1)
    assert order(first, 0) != order(make(seed=1), 0)
    assert order(pickle.loads(pickle.dumps(first)), 1) == order(first, 1)


def test_a_seeded_shuffle_keeps_its_own_seed() -> None:
    def make(**options: Any) -> Source:
        return source_of(tf.data.Dataset.range(20).shuffle(20, seed=3, **options), seed=options.pop("run", 0))

    again = tf.data.Dataset.range(20).shuffle(20, seed=3, reshuffle_each_iteration=False)
    fixed = source_of(again)
    assert order(fixed, 0) == order(fixed, 7) == [int(value) for value in again]
    moving = make()
    assert order(moving, 0) != order(moving, 1)
    other = source_of(tf.data.Dataset.range(20).shuffle(20, seed=4))
    assert order(moving, 0) != order(other, 0)


def test_a_shuffle_inside_an_interleave_is_seeded_too() -> None:
    def make() -> Source:
        inner = tf.data.Dataset.range(2).interleave(
            lambda i: tf.data.Dataset.range(8).shuffle(8).map(lambda j: i * 8 + j), cycle_length=2
        )
        return source_of(inner)

    assert sorted(order(make(), 0)) == list(range(16))
    assert order(make(), 0) == order(make(), 0)
    assert order(make(), 0) != order(make(), 1)


@pytest.mark.parametrize(
    ("make", "size", "length"),
    [
        (lambda: pipeline(), 32, 25),
        (lambda: pipeline().batch(4), 4, 25),
        (lambda: pipeline().batch(4, drop_remainder=True).prefetch(2), 4, 24),
        (lambda: pipeline().batch(4).map(lambda x, y: (x * 2, y)), 4, 25),
        (lambda: pipeline().batch(4).take(2), 4, None),
        (lambda: pipeline().filter(lambda x, y: y > 0).batch(5), 5, None),
        (lambda: pipeline().batch(4).unbatch(), 32, None),
    ],
)
def test_batch_size_and_length_are_read_off_the_pipeline(make: Any, size: int, length: int | None) -> None:
    source = source_of(make())
    assert (source.batch_size, source.length) == (size, length)
    found = list(source.dataset)
    assert length is None or len(found) == length
    assert found[0][0].shape == (6,)


# -- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_are_dealt_out_sample_by_sample(rank_pool: RankPool, ranks: int) -> None:
    """Order of the pipeline, ragged end and all: as one process that reads it (C2, C3, C5)."""
    trainer = trainer_of(rank_pool, ranks)
    data = pipeline().batch(4)
    history = trainer.fit(data, data, max_steps=4)
    history = trainer.fit(data, data, max_steps=7)
    assert off_the_oracle(trainer, 4 * ranks, 11) < EXACT
    assert history.batch["batch_size"] == 4
    assert history.epochs[-1]["val_loss"] > 0


def test_a_known_length_lets_a_schedule_end(rank_pool: RankPool) -> None:
    trainer = trainer_of(rank_pool, 1, scheduler="linear", log_every_n_steps=1)
    history = trainer.fit(pipeline().batch(5), epochs=1)
    assert history.steps["learning_rate"] == pytest.approx([0.3 * (1 - k / 5) for k in range(5)])


def test_python_inside_a_pipeline_needs_a_function_to_travel(rank_pool: RankPool) -> None:
    trainer = trainer_of(rank_pool, 2, batch_size=4)
    with pytest.raises(UserError, match="give a function that returns the pipeline"):
        trainer.fit(generated(), max_steps=1)
    trainer.fit(generated, max_steps=6)
    assert off_the_oracle(trainer, 8, 6) < EXACT


def generated() -> Any:
    """A pipeline that calls Python."""
    x, y = (part.numpy() for part in problem(25))
    signature = (tf.TensorSpec((6,), tf.float64), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=signature)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """25 samples in batches of 4."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        x, y = (part.numpy() for part in problem(25))
        return x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4]


def test_a_keras_dataset_is_dealt_out(rank_pool: RankPool) -> None:
    trainer = trainer_of(rank_pool, 2, **{"data.shuffle": False})
    trainer.fit(Batches(), Batches(), max_steps=9)
    assert off_the_oracle(trainer, 8, 9) < EXACT


def test_a_keras_dataset_shuffles_its_batches_by_seed_and_epoch() -> None:
    source = source_of(Batches())
    x = problem(25)[0].numpy()

    def read(epoch: int) -> list[int]:
        source.dataset.set_epoch(epoch)
        return [int(np.flatnonzero((x == sample[0]).all(1))[0]) for sample in source.dataset]

    assert sorted(read(0)) == list(range(25))
    assert read(0) == read(0) != read(1)
    assert read(0) != list(range(25))


def test_inputs_may_be_named(rank_pool: RankPool) -> None:
    x, y = (part.numpy() for part in problem(25, torch.float32))
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    joined = keras.layers.Concatenate()([left, right])
    model = keras.Model({"left": left, "right": right}, keras.layers.Dense(3)(joined))
    data = ({"left": x[:, :3], "right": x[:, 3:]}, y)
    kind = TensorFlowDistributedTrainer
    trainer = make_trainer(model, 2, rank_pool, kind=kind, batch_size=4, optimizer="sgd", learning_rate=0.3)
    history = trainer.fit(data, data, epochs=8)
    assert history.epochs[-1]["train_loss"] < history.epochs[0]["train_loss"]
    assert history.num_samples == 8 * 25


# -- what is refused or told ---------------------------------------------------------------------


def test_an_endless_pipeline_needs_an_end(rank_pool: RankPool) -> None:
    data = pipeline().repeat().batch(4)
    for train, val in ((data, None), (pipeline().batch(4), data)):
        with pytest.raises(UserError, match="never ends"):
            trainer_of(rank_pool, 1).fit(train, val)
    trainer = trainer_of(rank_pool, 1, max_steps=3)
    assert len(trainer.fit(data).steps["loss"]) == 3


def test_an_order_that_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(UserError, match=r"shuffle\(n, seed=...\)"):
        source_of(generated().shuffle(25))
    source_of(generated().shuffle(25, seed=1))


def test_random_numbers_without_a_seed_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    source_of(tf.data.Dataset.range(4).map(lambda value: value + tf.random.uniform((), 0, 3, tf.int64)))
    assert "RandomUniformInt" in capsys.readouterr().out
    source_of(tf.data.Dataset.range(4).map(lambda value: value + 1))
    assert "draws random" not in capsys.readouterr().out


def test_ragged_samples_are_refused() -> None:
    with pytest.raises(UserError, match="to_tensor"):
        source_of(tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])))


def test_a_rank_that_fails_is_named(rank_pool: RankPool) -> None:
    """A sample that the model cannot take is an error of a rank, not a hang of the others."""
    trainer = trainer_of(rank_pool, 2, batch_size=4)
    with pytest.raises((UserError, WorkerError)):
        trainer.fit((torch.zeros(8, 7, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)), max_steps=1)
