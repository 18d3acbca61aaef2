"""TensorFlowObjects: Keras models, optimizers and data in the caller's process."""

from __future__ import annotations

import distributed_backends.tensorflow.import_tensorflow  # noqa: F401 - before TensorFlow itself

# isort: split
import os
from dataclasses import replace
from typing import Any, cast

import keras
import tensorflow as tf

from distributed.communication.environment import detect
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.framework import Framework, refuse_foreign
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.system.tensors import digest_of
from distributed_backends.tensorflow.data import read_data
from distributed_backends.tensorflow.models import (
    PackedLoss,
    PackedModel,
    PackedOptimizer,
    build_model,
    check_model,
    first_batch,
    is_built,
    widest,
)
from distributed_backends.tensorflow.optimizers import RateHolder, in_width
from distributed_backends.tensorflow.state import as_torch, export_keras, fill_model, import_keras


class TensorFlowObjects(Framework):
    """`Trainer`'s interface to TensorFlow."""

    def __init__(self) -> None:
        if keras.backend.backend() != "tensorflow":
            raise UserError(
                "Keras uses another backend than TensorFlow",
                field="KERAS_BACKEND",
                got=keras.backend.backend(),
                allowed="tensorflow",
                remedy="Unset KERAS_BACKEND, or set it before Keras is imported",
            )

    def is_model(self, model: Any) -> bool:
        return isinstance(model, keras.Model)

    def check(self, model: Any, optimizer: Any) -> None:
        refuse_foreign(model, "model", "tensorflow")
        refuse_foreign(optimizer, "optimizer", "tensorflow")
        if self.is_model(model) and is_built(model):
            check_model(model)

    def carries_rate(self, model: Any, optimizer: Any) -> bool:
        if isinstance(optimizer, keras.optimizers.Optimizer):
            return True
        return optimizer is None and _compiled(model, "optimizer") is not None

    def num_gpus(self) -> int:
        return len(tf.config.list_physical_devices("GPU"))

    def build(self, model: Any, seed: int, task: Task) -> Any:
        return build_model(model, seed, "fp32", lambda: first_batch(task.train_data))

    def load_weights(self, reader: StateReader, model: Any) -> None:
        fill_model(reader, model)

    def optimizer_of(self, model: Any, optimizer: Any) -> Any:
        own = _compiled(model, "optimizer") if optimizer is None else optimizer
        return own if isinstance(own, keras.optimizers.Optimizer) else None

    def load_state(self, reader: StateReader, model: Any, optimizer: Any) -> None:
        if optimizer is None:
            fill_model(reader, model)
        else:
            holder = _holder(model, optimizer)
            import_keras(reader, model, holder)
            holder.write_rate()

    def digest(self, value: Any) -> str:
        settings = None if self.is_model(value) else keras.saving.serialize_keras_object(value)
        return digest_of([[as_torch(variable) for variable in value.variables], settings])

    def state_of(self, model: Any, optimizer: Any) -> BackendState:
        holder = None if optimizer is None else _holder(model, optimizer)
        return export_keras(model, holder, None, 0, 1)

    def has_history(self, optimizer: Any) -> bool:
        return False  # it is packed with its values

    def read(self, data: Any, argument: str, config: DistributedConfig) -> Any:
        return read_data(data, argument, config)

    def complete(self, task: Task) -> Task:
        """A compiled model brings its optimizer, loss and metrics; one without weights gets them here."""
        model = task.model
        if not self.is_model(model):
            return task
        if not is_built(model) and detect(os.environ) is None:
            build_model(model, 0, "fp32", lambda: first_batch(task.train_data))
            check_model(model)
        plain = task.loss_fn is None and task.training_step is None
        return replace(
            task,
            optimizer=_compiled(model, "optimizer") if task.optimizer is None else task.optimizer,
            loss_fn=_compiled_loss(model) if plain else task.loss_fn,
        )

    def pack(self, task: Task) -> Task:
        model, optimizer, loss = task.model, task.optimizer, cast(Any, task.loss_fn)
        if self.is_model(model):
            model = PackedModel.of(model)
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer = PackedOptimizer.of(optimizer)
        if isinstance(loss, keras.losses.Loss):
            loss = PackedLoss.of(loss)
        metrics: dict[str, Any] = dict(task.metrics or {})
        for name, metric in metrics.items():
            if isinstance(metric, keras.metrics.Metric):
                metrics[name] = PackedLoss.of(metric)
        return replace(task, model=model, optimizer=optimizer, loss_fn=loss, metrics=metrics or task.metrics)


def _holder(model: Any, optimizer: Any) -> RateHolder:
    with in_width(widest(model)):
        optimizer.build(model.trainable_variables)
    return RateHolder(optimizer, 0.0)


def _compiled(model: Any, name: str) -> Any:
    """Argument of `model.compile`, None when it was not called."""
    return getattr(model, name, None) if getattr(model, "compiled", False) else None


def _compiled_loss(model: Any) -> Any:
    loss = _compiled(model, "loss")
    if isinstance(loss, (dict, list, tuple)):
        raise UserError(
            "a loss for each of several outputs",
            field="model",
            got=f"compiled with {type(loss).__name__} of losses",
            remedy="Give training_step=lambda model, batch: ..., which returns their sum",
        )
    return loss if loss is None or isinstance(loss, (str, keras.losses.Loss)) else _KerasFunction(loss)


class _KerasFunction:
    """A loss function that was compiled: called as Keras calls it."""

    keras_signature = True

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return self.function(y_true, y_pred)
