"""The kit's workbench for TensorFlow: Keras twins of the torch reference, weights and all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from distributed.testing.reference_problem import small_model
from distributed.testing.workbench import Workbench

__all__ = ["TensorFlowWorkbench"]


class TensorFlowWorkbench(Workbench):
    """Keras models and optimizers."""

    def model(self, dtype: torch.dtype) -> Any:
        return self._model(dtype)

    def noisy_model(self) -> Any:
        return self._model(torch.float32, keras.layers.Dropout(0.2))

    def _model(self, dtype: torch.dtype, *between: Any) -> Any:
        name = str(dtype).removeprefix("torch.")
        model = keras.Sequential(
            [
                keras.Input((6,), dtype=name),
                keras.layers.Dense(8, activation="tanh", dtype=name),
                *between,
                keras.layers.Dense(3, dtype=name),
            ]
        )
        values = [p.detach().numpy() for p in small_model(dtype).parameters()]
        model.set_weights([value.T for value in values])
        return model

    def weights(self, model: Any) -> list[Tensor]:
        arrays = [np.asarray(v) for v in model.trainable_variables]
        return [torch.from_numpy(np.array(array.T, dtype=np.float64)) for array in arrays]

    def memory_model(self, length: int) -> Any:
        return Memory(length)

    def memory_step(self) -> Callable[[Any, Any], Any]:
        return _read_memory

    def optimizer(self, kind: str) -> Any:
        return {
            "sgd": keras.optimizers.SGD,
            # Keras rounds a plain number to float32.
            "momentum": partial(keras.optimizers.SGD, momentum=np.float64(0.9)),
            "adamw": partial(AdamWAsTorch, beta_1=0.9, beta_2=0.999, epsilon=1e-4, weight_decay=0.01),
        }[kind]

    def weighted_loss(self) -> Callable[[Any, Any], Any]:
        return _sum_and_count

    def validation_step(self) -> Callable[[Any, Any], dict[str, Any]]:
        return _ids

    def halving_schedule(self) -> Any:
        return _Halving


class Memory(keras.Model):  # type: ignore[misc]
    def __init__(self, length: int) -> None:
        super().__init__(dtype="float64")
        self.length = length
        self.cells = self.add_weight(shape=(length,), initializer="zeros", dtype="float64", name="cells")
        self.built = True

    def call(self, index: Any) -> Any:
        return tf.gather(self.cells.value, index)

    def get_config(self) -> dict[str, Any]:
        return {"length": self.length}


class AdamWAsTorch(keras.optimizers.AdamW):  # type: ignore[misc]
    """Keras adds epsilon before the second moment is corrected; torch after. This is torch's."""

    epsilon: Any

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        step = keras.ops.cast(self.iterations + 1, variable.dtype)
        plain, beta = self.epsilon, keras.ops.cast(self.beta_2, variable.dtype)
        self.epsilon = plain * keras.ops.sqrt(1 - keras.ops.power(beta, step))
        super().update_step(gradient, variable, learning_rate)
        self.epsilon = plain


class _Halving:
    """A scheduler over whatever holds ``param_groups``."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


def _read_memory(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(model(batch[0]))


def _sum_and_count(output: Any, target: Any) -> Any:
    weight = tf.cast(target + 1, output.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, output)
    return tf.reduce_sum(losses * weight), tf.reduce_sum(weight)


def _ids(model: Any, batch: Any) -> dict[str, Any]:
    model(batch[0])
    return {"id": (tf.reduce_sum(batch[1]), tf.size(batch[1]))}
