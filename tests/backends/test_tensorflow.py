"""The TensorFlow backend beyond the kit: one process over several devices, what returns, what repeats."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import TensorFlowDistributedTrainer, Trainer
from distributed.operations.report.record_format import NAME
from distributed.operations.report.stitch import read_runs
from distributed.testing.checkpoint_compare import ExportOnLoad, state_differences
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import masked_mean, problem
from distributed.testing.suite import EXACT, Run, Suite
from tests.support import commands
from tests.support.forking_python import PRELOAD
from tests.support.ports import free_port
from tests.support.training import make_trainer

keras = pytest.importorskip("keras", reason="pip install tensorflow")
tf = pytest.importorskip("tensorflow")


class TestMirrored(Suite):
    """One process that drives two logical CPUs."""

    backend = "tensorflow"

    def trainer(self, model: Any, ranks: int, **given: Any) -> Trainer:
        """`ranks` replicas."""
        trainer = TensorFlowDistributedTrainer(
            model, **{"num_gpus": ranks, "device": "cpu", "log_every_n_steps": 1, **given}
        )
        trainer.launcher = self.pool
        return trainer

    @pytest.mark.parametrize("length", [13, 25])
    def test_replicas_train_as_the_oracle_does(self, length: int) -> None:
        found = self.compare(2, problem(length), Run(2, max_norm=0.05))
        assert found.distance < EXACT
        assert found.history.world_size == 1
        assert found.history.batch["global_batch_size"] == 8
        assert found.history.steps["loss"] == pytest.approx(found.oracle.losses, abs=EXACT)

    def test_masked_targets_weigh_alike(self) -> None:
        x, y = problem(26)
        y = torch.where(torch.rand(26, generator=torch.Generator().manual_seed(3)) < 0.6, -100, y)
        run = Run(2, batch_size=3, max_norm=0.5)
        assert self.compare(2, (x, y), run, loss_fn=masked_mean).distance < EXACT

    def test_every_validation_sample_counts_once(self) -> None:
        trainer = self.trainer(self.bench.model(torch.float64), 2, batch_size=2, num_gpus=2)
        trainer.validation_step = self.bench.validation_step()
        for length in (1, 3, 6, 13):
            x, _ = problem(length)
            history = trainer.fit(problem(4), (x, torch.arange(length)), epochs=1)
            assert history.epochs[-1]["val_id"] == (length - 1) / 2

    def test_what_it_saved_several_processes_resume(self, tmp_path: Path) -> None:
        """Five steps by two replicas, the sixth to the eleventh by two processes, within an epoch."""
        fields: dict[str, Any] = {
            "global_batch_size": 12,
            "gradient_accumulation_steps": 1,
            "optimizer": self.bench.optimizer("momentum"),
            "learning_rate": 0.3,
            "checkpoint_dir": str(tmp_path),
            "resume_from_checkpoint": True,
        }
        self.trainer(self.bench.model(torch.float64), 2, **fields).fit(problem(25), max_steps=5)
        model = self.bench.model(torch.float64)
        self.trainer(model, 2, num_gpus=None, num_processes=2, **fields).fit(problem(25), max_steps=11)
        reference, _ = self.train_oracle(12, problem(25), Run(steps=11, optimizer="momentum"))
        assert self.distance(model, reference) < EXACT

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_what_two_processes_saved_fewer_and_more_resume(self, ranks: int, tmp_path: Path) -> None:
        """The same bits by name, within an epoch and with AdamW's two moments; then the weights of one
        process that was never interrupted."""
        fields: dict[str, Any] = {
            "num_gpus": None,
            "global_batch_size": 12,
            "gradient_accumulation_steps": 1,
            "optimizer": self.bench.optimizer("adamw"),
            "learning_rate": 0.05,
        }
        saver = self.trainer(
            self.bench.model(torch.float64), 2, num_processes=2, checkpoint_dir=str(tmp_path), **fields
        )
        path = saver.fit(problem(25), max_steps=5).checkpoint or ""
        model = self.bench.model(torch.float64)
        loader = self.trainer(model, ranks, num_processes=ranks, resume_from_checkpoint=path, **fields)
        loader.callbacks = [ExportOnLoad(str(tmp_path / "loaded"))]
        loader.fit(problem(25), max_steps=15)
        assert state_differences(path, str(tmp_path / "loaded" / Path(path).name)) == []
        reference = self.bench.model(torch.float64)
        self.trainer(reference, 1, num_processes=1, **fields).fit(problem(25), max_steps=15)
        assert self.distance(model, reference) < EXACT

    @pytest.mark.parametrize("where", ["num_gpus", "num_processes"])
    def test_what_was_validated_is_what_returns(self, where: str) -> None:
        """Each replica has batch statistics of its own; validation and the caller get rank 0's."""
        x, y = (part.numpy() for part in problem(50, torch.float32))
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
        )
        fields: dict[str, Any] = {"num_gpus": None, where: 2}
        history = self.trainer(model, 2, batch_size=4, **fields).fit((x, y), (x, y), epochs=2)
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        assert history.epochs[-1]["val_loss"] == pytest.approx(model.evaluate(x, y, verbose=0), abs=1e-5)


# -- the same configuration in another framework ------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "adam", "weight_decay": 0.01, "gradient_clipping": 0.5},
        {"optimizer": "adamw", "weight_decay": 0.01},
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_a_named_optimizer_means_what_it_means_under_torch(fields: dict[str, Any]) -> None:
    """A falling rate tells torch's momentum from Keras's, a small epsilon Keras's Adam from torch's."""
    suite, models = Suite(), []
    for backend in ("serial", "tensorflow"):
        suite.backend = backend
        suite.__dict__.pop("bench", None)
        model = suite.bench.model(torch.float64)
        trainer = Trainer(
            model,
            backend=backend,
            batch_size=4,
            learning_rate=0.05,
            scheduler="cosine",
            warmup_steps=3,
            **fields,
        )
        trainer.fit(problem(25), max_steps=20)
        models.append(suite.bench.weights(model))
    assert max(float((a - b).abs().max()) for a, b in zip(*models, strict=True)) < EXACT


@pytest.mark.slow
def test_a_compiled_model_trains_as_keras_trains_it() -> None:
    """Keras's own fit is the oracle: optimizer, loss, sample weights and a penalty on the weights."""
    x, y = (part.numpy() for part in problem(24, torch.float32))
    weight = np.linspace(0.1, 2.0, 24, dtype=np.float32)

    def build() -> Any:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", kernel_regularizer="l2"),
                keras.layers.Dense(3, "softmax"),
            ]
        )
        model.set_weights(
            [
                np.full(w.shape, 0.1, w.dtype) + np.arange(w.size).reshape(w.shape) / 50
                for w in model.get_weights()
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    theirs, ours = build(), build()
    theirs.fit(x, y, sample_weight=weight, batch_size=8, epochs=3, shuffle=False, verbose=0)
    trainer = TensorFlowDistributedTrainer(ours, batch_size=8, **{"data.shuffle": False})
    history = trainer.fit((x, y, weight), (x, y), epochs=3)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    loss, accuracy = theirs.evaluate(x, y, verbose=0)
    assert history.epochs[-1]["val_loss"] == pytest.approx(loss, abs=1e-5)
    assert history.epochs[-1]["val_accuracy"] == pytest.approx(accuracy)


@pytest.mark.slow
def test_a_model_under_a_strategy_of_the_users_own_is_trained() -> None:
    """As in the README of many a project: strategy, scope, compile; then our fit, twice."""
    x, y = (part.numpy() for part in problem(40, torch.float32))
    with tf.distribute.MirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40).batch(8)
    model.fit(dataset, epochs=1, verbose=0)
    trainer = TensorFlowDistributedTrainer(model)
    trainer.fit(dataset, dataset, epochs=2)
    history = trainer.fit(dataset, dataset, epochs=1)
    assert [epoch["epoch"] for epoch in history.epochs] == [2]
    assert history.epochs[-1]["val_loss"] == pytest.approx(model.evaluate(dataset, verbose=0)[0], abs=1e-5)


def unbuilt() -> Any:
    """Without an Input layer: the first batch decides the shapes."""
    return keras.Sequential(
        [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(3, "softmax", dtype="float64")]
    )


@pytest.mark.slow
def test_a_model_of_a_strategy_trains_as_keras_trains_it_before_it_has_weights() -> None:
    x, y = (part.numpy() for part in problem(40, torch.float64))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    loss = keras.losses.SparseCategoricalCrossentropy(dtype="float64")
    keras.utils.set_random_seed(3)
    theirs = unbuilt()
    theirs.compile(keras.optimizers.SGD(0.125), loss)
    theirs.fit(dataset, epochs=2, verbose=0)
    keras.utils.set_random_seed(3)
    with tf.distribute.MirroredStrategy().scope():
        ours = unbuilt()
        ours.compile(keras.optimizers.SGD(0.125), loss)
    TensorFlowDistributedTrainer(ours).fit(dataset, dataset, epochs=2)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT)


def under_a_strategy() -> Any:
    with tf.distribute.MirroredStrategy().scope():
        return unbuilt()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_may_build_the_model_under_a_strategy(ranks: int, rank_pool: RankPool) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy()
    data, fields = problem(40, torch.float64), {"learning_rate": 0.1, "optimizer": "sgd", "epochs": 2}

    def trained(build: Any, ranks: int) -> list[Any]:
        trainer: Any = make_trainer(
            build, ranks, rank_pool, backend="tensorflow", global_batch_size=8, loss_fn=loss, **fields
        )
        trainer.fit(data)
        return list(trainer.model.get_weights())

    for a, b in zip(trained(under_a_strategy, ranks), trained(unbuilt, 1), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT)


def test_a_keras_model_leaves_the_record_that_a_torch_model_leaves(tmp_path: Path) -> None:
    x, y = (part.numpy() for part in problem(64, torch.float32))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    given: dict[str, Any] = {"batch_size": 8, "log_every_n_steps": 4, "checkpoint_dir": str(tmp_path)}
    TensorFlowDistributedTrainer(model, **given).fit((x, y), (x, y), epochs=1)
    (run,) = read_runs(tmp_path)
    (attempt,) = run.attempts
    kinds = [json.loads(line)["kind"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert kinds == ["start", "log", "log", "epoch", "checkpoint", "finish", "end"]
    assert (run.status, attempt.step, run.place["backend"]) == ("finished", 0, "tensorflow")


# -- randomness, precision, schedules -----------------------------------------------------------


def _with_dropout() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,), dtype="float64"),
            keras.layers.Dense(8, dtype="float64"),
            keras.layers.Dropout(0.5, dtype="float64"),
            keras.layers.Dense(3, dtype="float64"),
        ]
    )


@pytest.mark.slow
def test_a_continued_run_draws_the_same_masks() -> None:
    def run(*parts: int) -> list[Any]:
        trainer = TensorFlowDistributedTrainer(_with_dropout, batch_size=4)
        for steps in parts:
            trainer.fit(problem(25), max_steps=steps)
        return list(trainer.model.get_weights())

    whole, parts = run(8), run(5, 3)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_ranks_draw_different_masks(rank_pool: RankPool) -> None:
    """Equal samples on both ranks: with equal masks the mean of two would be that of one."""
    x, y = torch.ones(2, 6, dtype=torch.float64), torch.tensor([1, 1])
    after = []
    for ranks, length in ((1, 1), (2, 2)):
        fields = {"backend": "tensorflow", "batch_size": 1, "optimizer": "sgd", "learning_rate": 0.5}
        trainer = make_trainer(_with_dropout, ranks, rank_pool, **fields)
        trainer.fit((x[:length], y[:length]), max_steps=1)
        after.append(trainer.model.get_weights()[0])
    assert np.abs(after[0] - after[1]).max() > 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_is_skipped_by_all_and_the_scale_halves(ranks: int, rank_pool: RankPool) -> None:
    x, y = problem(16, torch.float32)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    fields = {"backend": "tensorflow", "mixed_precision": "fp16", "scaler_init_scale": 2.0**40}
    trainer = make_trainer(model, ranks, rank_pool, batch_size=4, **fields)
    history = trainer.fit((x, y), max_steps=40)
    assert 0 < history.num_skipped_steps < 40
    assert np.isfinite(model.get_weights()[0]).all()


def test_the_optimizers_own_schedule_counts_steps(rank_pool: RankPool) -> None:
    x, y = problem(16, torch.float32)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.5, 0.25, 0.125])
    trainer = make_trainer(
        model, 2, rank_pool, backend="tensorflow", optimizer=keras.optimizers.SGD(schedule), batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    history = trainer.fit((x, y), max_steps=5)
    assert history.steps["learning_rate"] == [0.5, 0.5, 0.25, 0.25, 0.125]


# -- from outside ------------------------------------------------------------------------------

JOINED = """
import os, keras, numpy as np
from tensorflow.python.eager.context import context
from distributed import TensorFlowDistributedTrainer
def build():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
MODEL
trainer = TensorFlowDistributedTrainer(model, batch_size=4, device="cpu", seed=1, collective_timeout=77)
for _ in range(2):
    history = trainer.fit((x, y), (x, y), epochs=1)
# One write each: what ranks print to one pipe may run together.
os.write(1, f"LOSS {history.world_size} {history.epochs[-1]['val_loss']:.6f}\\n".encode())
service = context().coordination_service
os.write(1, f"HEARTBEAT {service.heartbeat_timeout_in_ms} {len(service.coordinated_job_list)}\\n".encode())
"""


@pytest.mark.parametrize("model", ["build", "build()"])
def test_ranks_of_torchrun_join(model: str, tmp_path: Path, forking_python: Path) -> None:
    """A factory trains; a model that started TensorFlow before the ranks met is refused with the way out."""
    script = tmp_path / "train.py"
    script.write_text(JOINED.replace("MODEL", f"model = {model}"))
    env = {**os.environ, "PYTHON_EXEC": str(forking_python), PRELOAD: "tensorflow keras"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = commands.run(
        [*command, "--master-port", str(free_port()), str(script)], env=env, capture_output=True, timeout=200
    )
    if model == "build":
        assert done.returncode == 0, done.stderr[-2000:]
        lines = re.findall(r"LOSS (\d) ([\d.]+)", done.stdout)
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert lines[0][0] == "2"
        # TensorFlow's own limit would end a run for a rank that is suspended for a shorter time.
        assert re.findall(r"HEARTBEAT (.*)", done.stdout) == ["77000 1"] * 2
    else:
        assert done.returncode != 0
        assert "give functions that build the model" in " ".join(done.stderr.split())


@pytest.mark.starts_processes
def test_the_command_line_trains_the_bundled_example() -> None:
    done = commands.run(
        [
            sys.executable, "-m", "distributed.cli", "train", "--backend", "tensorflow",
            "--num-processes", "2", "--epochs", "15",
        ],
        capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"best validation accuracy ([\d.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) >= 0.95
