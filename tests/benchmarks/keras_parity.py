"""Backend `tensorflow` beside plain Keras in one process: largest difference of any weight.

    OMP_NUM_THREADS=1 python tests/benchmarks/keras_parity.py | grep '^|'

The reference is what a page of Keras says: the whole global batch at once, ``GradientTape``,
``optimizer.apply_gradients``, no strategy; the samples come in the published order. 20 steps of 24
samples on 101, so that every fifth batch is ragged. AdamW has eps=1e-4.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
import torch

from distributed import Trainer
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import problem, small_model
from distributed.testing.tensorflow_workbench import TensorFlowWorkbench

BATCH, STEPS, SAMPLES = 24, 20, 101
RATE = 0.125  # Keras rounds rates to float32, which keeps this one.
BENCH = TensorFlowWorkbench()
COLUMNS = [("float64", "sgd"), ("float32", "sgd"), ("float32", "adamw"), ("bf16", "sgd")]


def plain_keras(dtype: str, optimizer: str) -> list[torch.Tensor]:
    """Weights after `STEPS` steps without any of ours."""
    wide = torch.float64 if dtype == "float64" else torch.float32
    policy = "mixed_bfloat16" if dtype == "bf16" else dtype
    layers = [keras.layers.Dense(8, activation="tanh", dtype=policy), keras.layers.Dense(3, dtype=policy)]
    model = keras.Sequential([keras.Input((6,), dtype=str(wide).removeprefix("torch.")), *layers])
    model.set_weights([p.detach().numpy().T for p in small_model(wide).parameters()])
    chosen = BENCH.optimizer(optimizer)(learning_rate=RATE)
    x, y = (tensor.numpy() for tensor in problem(SAMPLES, wide))
    batches = (
        order[start : start + BATCH].numpy()
        for epoch in itertools.count()
        for order in [sample_order(SAMPLES, 0, epoch)]
        for start in range(0, SAMPLES, BATCH)
    )
    for batch in itertools.islice(batches, STEPS):
        with tf.GradientTape() as tape:
            logits = tf.cast(model(x[batch], training=True), tf.float64 if dtype == "float64" else tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y[batch], logits))
        chosen.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
    return BENCH.weights(model)


def ours(dtype: str, optimizer: str, ranks: int, accumulation: int, pool: RankPool) -> list[torch.Tensor]:
    """Weights after the same steps of the backend."""
    wide = torch.float64 if dtype == "float64" else torch.float32
    model = BENCH.model(wide)
    trainer = Trainer(
        model,
        backend="tensorflow",
        num_processes=ranks,
        device="cpu",
        global_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        optimizer=BENCH.optimizer(optimizer),
        learning_rate=RATE,
        mixed_precision="bf16" if dtype == "bf16" else False,
    )
    trainer.launcher = pool
    trainer.fit(BENCH.data(*problem(SAMPLES, wide)), max_steps=STEPS)
    return BENCH.weights(model)


def main() -> None:
    """Print the table as Markdown."""
    print("| ranks | accumulation | " + " | ".join(" ".join(column) for column in COLUMNS) + " |")
    print("| --- " * (2 + len(COLUMNS)) + "|")
    expected: dict[tuple[str, str], Any] = {column: plain_keras(*column) for column in COLUMNS}
    for ranks in (1, 2, 4):
        pool = RankPool(timeout=300.0)
        for accumulation in (1, 2):
            row = []
            for column in COLUMNS:
                found = ours(*column, ranks, accumulation, pool)
                pairs = zip(found, expected[column], strict=True)
                row.append(max(float((a - b).abs().max()) for a, b in pairs))
            print(
                f"| {ranks} | {accumulation} | " + " | ".join(f"{value:.1e}" for value in row) + " |",
                flush=True,
            )
        pool.close()


if __name__ == "__main__":
    main()
