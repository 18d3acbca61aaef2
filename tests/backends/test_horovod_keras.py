"""Keras models on Horovod's ranks: as a plain Keras loop in one process, and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import HorovodTrainer, Trainer, UserError
from distributed.config import DistributedConfig
from distributed.config.load import override
from distributed.data.order import share
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.backend_choice import choose_backend
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import problem
from tests.support.keras_float64 import float64
from tests.support.training import make_trainer

keras = pytest.importorskip("keras", reason="pip install tensorflow")
tf = pytest.importorskip("tensorflow")

from distributed_backends.horovod.ranks import HorovodCollectives  # noqa: E402 - after TensorFlow

CLOSE = 1e-12
MASKED = -100
trainer_of = partial(make_trainer, ranks=2, kind=HorovodTrainer, **{"data.shuffle": False})


def build(*between: Any) -> Any:
    layers = [
        keras.layers.Dense(8, "tanh", dtype="float64"),
        *between,
        keras.layers.Dense(3, dtype="float64"),
    ]
    model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers])
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        variable.assign(np.sin(np.arange(size) + 1.0).reshape(variable.shape) / 2)
    return model


def optimizer_of(kind: str) -> Any:
    """Keras's own, in float64: it would round its numbers to float32."""
    with float64():
        if kind == "adam":
            return keras.optimizers.Adam(0.05, epsilon=1e-4)
        return keras.optimizers.SGD(0.2, momentum=0.9)


def masked(length: int) -> tuple[Any, Any]:
    """Samples of which every slice of a batch masks another number."""
    x, y = (part.numpy() for part in problem(length))
    y[np.random.default_rng(0).random(length) < 0.4] = MASKED
    return x, y


def sum_of_losses(model: Any, x: Any, y: Any) -> tuple[Any, int]:
    """(sum over unmasked targets, their number), in training mode."""
    losses = keras.losses.sparse_categorical_crossentropy(
        np.where(y == MASKED, 0, y), model(x, training=True), from_logits=True
    )
    return tf.reduce_sum(losses * (y != MASKED)), int((y != MASKED).sum())


def plain_loop(
    model: Any, optimizer: Any, x: Any, y: Any, batch: int, steps: int, max_norm: float = math.inf
) -> list[Any]:
    """Keras by hand in one process: the mean over a batch, clipped as torch clips, applied."""
    starts = [start for _ in range(steps) for start in range(0, len(x), batch)][:steps]
    for start in starts:
        with tf.GradientTape() as tape:
            total, count = sum_of_losses(model, x[start : start + batch], y[start : start + batch])
            loss = total / max(count, 1)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        factor = min(max_norm / (float(tf.linalg.global_norm(gradients)) + 1e-6), 1.0)
        optimizer.apply([g * factor for g in gradients], model.trainable_variables)
    return list(model.get_weights())


def distance(one: Sequence[Any], other: Sequence[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


# -- the same training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "accumulation", "optimizer", "clipping"),
    [(2, 1, "momentum", None), (2, 2, "adam", 0.5), (3, 2, "momentum", 0.5), (1, 1, "adam", 0.5)],
)
def test_ranks_train_as_a_plain_loop_in_one_process(
    ranks: int, accumulation: int, optimizer: str, clipping: float | None, rank_pool: RankPool
) -> None:
    """26 samples: the last batch is uneven, and one of three ranks has no sample of it."""
    x, y = masked(26)
    model = build()
    trainer = trainer_of(
        model,
        pool=rank_pool,
        ranks=ranks,
        batch_size=2,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clipping,
        optimizer=optimizer_of(optimizer),
    )
    history = trainer.fit((x, y), max_steps=16)
    batch = 2 * ranks * accumulation
    expected = plain_loop(build(), optimizer_of(optimizer), x, y, batch, 16, clipping or math.inf)
    assert (history.backend, history.world_size) == ("horovod", ranks)
    assert distance(model.get_weights(), expected) < CLOSE
    if ranks > 1:
        assert history.logs[-1]["exposed_communication_seconds"] > 0


class Skips(HorovodCollectives):
    """Mutant: every rank keeps its own gradients."""

    def sum_arrays(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        return [torch.from_dlpack(array).clone() for array in arrays]


class Averages(HorovodCollectives):
    """Mutant: the mean of the gradients over the ranks, and the sum of their counts."""

    def sum_arrays(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        *gradients, counts = super().sum_arrays(arrays)
        return [*(gradient / self.world.size for gradient in gradients), counts]


@pytest.mark.parametrize("mutant", [Skips, Averages])
def test_the_comparison_with_a_plain_loop_detects_mutants(
    mutant: type[HorovodCollectives], rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(get_catalog().backend("horovod"), collectives=f"{__name__}:{mutant.__name__}")
    monkeypatch.setitem(get_catalog().backends, "horovod", spec)
    x, y = masked(26)
    model = build()
    trainer_of(model, pool=rank_pool, batch_size=4, optimizer=optimizer_of("momentum")).fit(
        (x, y), max_steps=4
    )
    assert distance(model.get_weights(), plain_loop(build(), optimizer_of("momentum"), x, y, 8, 4)) > 1e-3


class TwoWays(keras.Model):  # type: ignore[misc]
    """Micro-batches of fewer than three samples use another weight."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        shape = {"shape": (6, 3), "initializer": "zeros", "dtype": "float64"}
        self.large, self.small = (
            self.add_weight(name="large", **shape),
            self.add_weight(name="small", **shape),
        )
        self.rest = self.add_weight(name="rest", **shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return tf.matmul(x, (self.large if x.shape[0] >= 3 else self.small).value)

    def get_config(self) -> dict[str, Any]:
        return {}


def test_a_weight_that_one_rank_uses_moves_on_all(rank_pool: RankPool) -> None:
    """Of five samples one rank has three and the other two. A weight that none uses stays, decay or not."""
    x, y = (part.numpy() for part in problem(5))
    model, reference = TwoWays(), TwoWays()
    trainer_of(model, pool=rank_pool, batch_size=3, optimizer=optimizer_of("momentum")).fit((x, y), epochs=3)
    optimizer = optimizer_of("momentum")
    for _ in range(3):
        with tf.GradientTape() as tape:
            parts = [sum_of_losses(reference, x[a:b], y[a:b])[0] for a, b in (share(5, r, 2) for r in (0, 1))]
            loss = tf.add_n(parts) / 5
        used = [reference.large, reference.small]
        optimizer.apply(tape.gradient(loss, [v.value for v in used]), used)
    assert distance(model.get_weights(), reference.get_weights()) < CLOSE
    assert not np.any(model.get_weights()[2])


def normalized() -> Any:
    return build(keras.layers.BatchNormalization(momentum=0.5, dtype="float64"))


def test_statistics_are_each_ranks_own_and_rank_0s_return(rank_pool: RankPool) -> None:
    """As under `tensorflow`: batches are normalized by rank, and what is validated is what returns."""
    x, y = (part.numpy() for part in problem(26))
    model = normalized()
    trainer = trainer_of(model, pool=rank_pool, batch_size=4, optimizer=optimizer_of("momentum"))
    history = trainer.fit((x, y), (x, y), epochs=2)
    replicas, optimizer = [normalized(), normalized()], optimizer_of("momentum")
    for start in [*range(0, 26, 8)] * 2:
        length = min(8, 26 - start)
        gradients = []
        for rank, replica in enumerate(replicas):
            begin, end = (start + bound for bound in share(length, rank, 2))
            with tf.GradientTape() as tape:
                loss = sum_of_losses(replica, x[begin:end], y[begin:end])[0] / length
            gradients.append(tape.gradient(loss, [v.value for v in replica.trainable_variables]))
        first, second = replicas
        optimizer.apply([a + b for a, b in zip(*gradients, strict=True)], first.trainable_variables)
        for ours, theirs in zip(first.trainable_variables, second.trainable_variables, strict=True):
            theirs.assign(ours)
    assert distance(model.get_weights(), replicas[0].get_weights()) < CLOSE
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64"))
    assert history.epochs[-1]["val_loss"] == pytest.approx(model.evaluate(x, y, verbose=0), abs=1e-6)


def with_dropout() -> Any:
    return build(keras.layers.Dropout(0.5, dtype="float64", seed=3))


def test_a_continued_run_draws_the_same_masks(rank_pool: RankPool) -> None:
    def run(*parts: int) -> list[Any]:
        trainer = trainer_of(
            with_dropout, pool=rank_pool, batch_size=4, optimizer=keras.optimizers.SGD, learning_rate=0.25
        )
        for steps in parts:
            trainer.fit(problem(25), max_steps=steps)
        return list(trainer.model.get_weights())

    assert distance(run(8), run(5, 3)) == 0


def test_ranks_draw_different_masks(rank_pool: RankPool) -> None:
    """Equal samples on both ranks: with equal masks the mean of two would be that of one."""
    x, y = torch.ones(2, 6, dtype=torch.float64), torch.tensor([1, 1])
    after = []
    for ranks in (1, 2):
        model = with_dropout()
        trainer = trainer_of(model, pool=rank_pool, ranks=ranks, batch_size=1, optimizer=optimizer_of("sgd"))
        trainer.fit((x[:ranks], y[:ranks]), max_steps=1)
        after.append(model.get_weights())
    assert distance(*after) > 1e-3


def test_an_overflow_is_skipped_by_all_and_the_scale_halves(rank_pool: RankPool) -> None:
    x, y = problem(16, torch.float32)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    fields = {"mixed_precision": "fp16", "scaler_init_scale": 2.0**40}
    history = trainer_of(model, pool=rank_pool, batch_size=4, **fields).fit((x, y), max_steps=40)
    assert 0 < history.num_skipped_steps < 40
    assert np.isfinite(model.get_weights()[0]).all()


def mean_output(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(model(batch[0]))


def test_weights_of_a_dtype_that_horovod_lacks_train(rank_pool: RankPool) -> None:
    """All numbers are powers of two, and exact in bfloat16: every step takes 1/8 from each weight."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, use_bias=False, dtype="bfloat16")])
    model.set_weights([np.full((6, 4), 2.0, np.float32)])
    trainer = trainer_of(
        model,
        pool=rank_pool,
        batch_size=4,
        optimizer="sgd",
        learning_rate=0.5,
        training_step=mean_output,
    )
    trainer.fit((torch.ones(8, 6), torch.zeros(8)), max_steps=3)
    assert np.all(np.asarray(model.get_weights()[0], np.float32) == 2.0 - 3 / 8)


# -- what is sent, and from where ranks begin ----------------------------------------------------


def test_each_dtype_is_one_array_a_window(rank_pool: RankPool, tmp_path: Path) -> None:
    """Counted in Horovod's own record, which `horovod.timeline` keeps here, too."""
    timeline = tmp_path / "made" / "timeline.json"
    fields = {"gradient_accumulation_steps": 2, "horovod": {"timeline": str(timeline)}}
    trainer_of(build(), pool=rank_pool, batch_size=2, optimizer=optimizer_of("adam"), **fields).fit(
        problem(25), max_steps=6
    )
    events = [e for e in json.loads(timeline.read_text().rstrip().rstrip(",]") + "]") if e]
    lanes = {e["pid"]: e["args"].get("name") for e in events if e.get("name") == "process_name"}
    sent = [lanes[e["pid"]] for e in events if e.get("name") == "ALLREDUCE"]
    arrays = [name for name in sent if "array." in name]
    assert len(set(arrays)) == 2  # the weights of one dtype, and the counts
    assert len(arrays) == 2 * 6


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


def of_the_rank() -> Any:
    model = build()
    model.set_weights([w + rank_here() for w in model.get_weights()])
    return model


def of_as_many_units_as_ranks() -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3 + rank_here())])


def test_ranks_begin_with_the_weights_of_the_first(rank_pool: RankPool) -> None:
    x, y = (part.numpy() for part in problem(24))
    given: dict[str, Any] = {"pool": rank_pool, "batch_size": 4, "optimizer": keras.optimizers.SGD}
    trainer = trainer_of(of_the_rank, learning_rate=0.25, **given)
    trainer.fit((x, y), max_steps=3)
    expected = plain_loop(build(), keras.optimizers.SGD(0.25), x, y, 8, 3)
    assert distance(trainer.model.get_weights(), expected) < CLOSE
    with pytest.raises(UserError, match=r"ranks have built different models.*kernel.*rank 0"):
        trainer_of(of_as_many_units_as_ranks, **given).fit((x, y), max_steps=1)


# -- checkpoints ---------------------------------------------------------------------------------


def test_a_run_moves_between_horovod_and_tensorflow(rank_pool: RankPool, tmp_path: Path) -> None:
    """Five steps on two ranks of Horovod, three on one process of `tensorflow`, three on Horovod again,
    within epochs, with Adam's moments."""
    x, y = masked(26)
    given: dict[str, Any] = {
        "global_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "checkpoint_dir": tmp_path,
        "resume_from_checkpoint": True,
        "data.shuffle": False,
    }
    for backend, ranks, until in (("horovod", 2, 5), ("tensorflow", 1, 8), ("horovod", 2, 11)):
        model = build()
        trainer = make_trainer(
            model, ranks, rank_pool, backend=backend, optimizer=optimizer_of("adam"), **given
        )
        history = trainer.fit((x, y), epochs=9, max_steps=until)
        assert history.steps["step"][-1] == until
    assert history.steps["step"] == [9, 10, 11]
    assert distance(model.get_weights(), plain_loop(build(), optimizer_of("adam"), x, y, 8, 11)) < CLOSE


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"horovod.compression": "fp16"}, r"'horovod \(tensorflow\)' cannot send gradients by .* 'fp16'"),
        ({"compression.codec": "top-k"}, r"'horovod \(tensorflow\)' cannot send gradients by .* 'top-k'"),
        ({"tensorflow.strategy": "multi_worker"}, "'horovod' does not read TensorFlow's options"),
        ({"sync_batchnorm": True}, "cannot synchronise BatchNorm"),
        ({"activation_checkpointing": "full"}, "cannot recompute activations"),
        (
            {"low_communication": {"mode": "local-sgd", "period": 4}},
            r"'horovod \(tensorflow\)' .*local-sgd",
        ),
    ],
)
def test_what_does_not_apply_is_refused(fields: dict[str, Any], message: str, rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match=message):
        trainer_of(build(), pool=rank_pool, batch_size=4, **fields).fit(problem(8), max_steps=1)


def test_nccl_is_refused_where_arrays_are_summed_in_host_memory() -> None:
    config = DistributedConfig(backend="horovod", num_gpus=2)
    choice = choose_backend(config, get_catalog(), "tensorflow")
    plan = resolve(config, get_catalog(), Facts(), Resources(2), None, choice)
    assert (plan.world_size, plan.num_replicas, plan.communication_backend) == (2, 1, "gloo")
    choice = replace(choice, config=override(config, {"communication_backend": "nccl"}, "test"))
    with pytest.raises(UserError, match=r"in host memory.*Allowed: auto, gloo, mpi"):
        resolve(config, get_catalog(), Facts(), Resources(2), None, choice)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # The framework of a function's model is known from an object of Keras beside it alone.
        (lambda: HorovodTrainer(build), "a Keras model was given to a backend that trains torch models"),
        (lambda: HorovodTrainer(build(), optimizer=torch.optim.SGD), "a torch optimizer was given"),
        (
            lambda: HorovodTrainer(torch.nn.Linear(6, 3), keras.optimizers.SGD()),
            "a Keras optimizer was given",
        ),
        (lambda: Trainer(build(), backend="ray"), "a Keras model was given to a backend that trains torch"),
        (lambda: HorovodTrainer(object()), "not something that can be trained"),
    ],
)
def test_objects_that_do_not_fit_are_refused(make: Callable[[], Trainer], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make().fit(problem(8), max_steps=1)


# -- started by Horovod --------------------------------------------------------------------------

SCRIPT = """
import json, os, pathlib
import keras, numpy as np
from distributed import HorovodTrainer
from tests.backends.test_horovod_keras import build, masked, optimizer_of
rank = int(os.environ["HOROVOD_RANK"])
model = build()
model.set_weights([w + rank for w in model.get_weights()])
model(np.zeros((1, 6)))  # TensorFlow has started before the ranks meet
x, y = masked(26)
fields = {"device": "cpu", "data.shuffle": False}
trainer = HorovodTrainer(model, optimizer_of("momentum"), batch_size=4, **fields)
history = trainer.fit((x, y), max_steps=9)
stepper = HorovodTrainer(model, keras.optimizers.SGD(0.5), device="cpu")
said = {"weights": [w.tolist() for w in model.get_weights()], "world": history.world_size}
said["mean"] = trainer.metric_average(float(rank), name="rank")
stepper.train_step(x[: 4 + rank], np.zeros(4 + rank, np.int64))
said["stepped"] = [w.tolist() for w in model.get_weights()]
pathlib.Path(os.environ["SAID"], f"{rank}.json").write_text(json.dumps(said))
"""


@pytest.mark.starts_processes
def test_a_script_under_horovodrun(tmp_path: Path) -> None:
    """A model that exists before the ranks meet trains from rank 0's weights; a loop of one's own, too."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SAID": str(tmp_path)}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        env={**os.environ, **variables, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert (first["world"], first["mean"]) == (2, 0.5)
    x, y = masked(26)
    model = build()
    expected = plain_loop(model, optimizer_of("momentum"), x, y, 8, 9)
    assert distance([np.array(w) for w in first["weights"]], expected) < CLOSE
    parts, target = np.concatenate([x[:4], x[:5]]), np.zeros(9, np.int64)
    stepped = plain_loop(model, keras.optimizers.SGD(0.5), parts, target, 9, 1)
    assert distance([np.array(w) for w in first["stepped"]], stepped) < CLOSE
