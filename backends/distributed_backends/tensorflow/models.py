"""Keras models and optimizers: built, checked, and in a form that travels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distributed.errors import UserError
from distributed.interfaces.framework import refuse_foreign
from distributed_backends.tensorflow.strategy import strategies_of_factories
from distributed_backends.tensorflow.values import as_array, to_array, tupled

_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


# -- building ------------------------------------------------------------------------------


def build_model(model: Any, seed: int, precision: str, batch: Callable[[], Any]) -> Any:
    """A Keras model with weights: as it is, or what a factory builds under `seed`.

    Args:
        model: a Keras model, or a factory without arguments.
        seed: makes all ranks build the same weights.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for Keras's mixed policies.
        batch: gives a batch of one sample, for a model that learns its shapes from data.

    Raises:
        UserError: neither a Keras model nor a factory of one, or it cannot be called on the data.
    """
    refuse_foreign(model, "model", "tensorflow")
    with _seeded(seed), _policy(precision):
        packed = model if isinstance(model, PackedModel) else None
        model = unpack(model)
        if not isinstance(model, keras.Model) and callable(model):
            with strategies_of_factories(tf.distribute.get_strategy()):
                model = model()
            refuse_foreign(model, "model", "tensorflow")
        if not isinstance(model, keras.Model):
            raise UserError(
                "not a trainable model",
                field="model",
                got=type(model).__name__,
                allowed="a Keras model, or a function without arguments that builds one",
            )
        if not is_built(model):
            _build_on(model, batch())
    if packed is not None:
        packed.fill(model)
    return model


def is_foreign(model: Any, strategy: Any) -> bool:
    """Return whether a Keras model was made under a strategy of the user's own, and not under `strategy`."""
    if not isinstance(model, keras.Model):
        return False
    own = getattr(model, "_distribute_strategy", None)
    if own is not None and own is not strategy:
        return True
    return is_built(model) and any(
        hasattr(v.value, "_distribute_strategy") and hasattr(v.value, "values") for v in model.variables
    )


def is_built(model: Any) -> bool:
    """Whether the model has all its weights."""
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def _build_on(model: Any, batch: Any) -> None:
    inputs = batch[0] if isinstance(batch, (tuple, list)) and len(batch) > 1 else batch
    try:
        with model.distribute_strategy.scope():  # where a model is made decides where its weights belong
            model(tf.nest.map_structure(tf.convert_to_tensor, inputs))
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise UserError(
            f"the model cannot be called on a sample of the data: {str(error).splitlines()[0]}",
            field="model",
            got=type(model).__name__,
            remedy="Build it before (an Input layer does), or look at the shape of the samples",
        ) from error


def first_batch(source: Any) -> Any:
    """A batch of the source's first sample alone, as `as_array` gives it."""
    if source is None:
        raise UserError(
            "the model has no weights yet and there is no data to derive its shapes from",
            field="model",
            remedy="Give it an Input layer, or call it once",
        )
    sample = source.dataset[0] if source.is_map else next(iter(source.dataset))
    return tf.nest.map_structure(as_array, tupled(source.collate_fn([sample])))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Keras draws the seeds of initializers from `random`, and restores nothing."""
    before, numbers = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)


@contextmanager
def _policy(precision: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    if precision in _POLICIES:
        keras.config.set_dtype_policy(_POLICIES[precision])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def apply_precision(model: Any, precision: str) -> Callable[[], None]:
    """Let the float32 layers of a model that is built already compute in `precision`.

    Returns:
        What puts their own policies back.
    """
    changed: list[tuple[Any, Any]] = []
    if precision in _POLICIES:
        for layer in model._flatten_layers():
            if layer.dtype_policy.name == "float32":
                changed.append((layer, layer.dtype_policy))
                layer.dtype_policy = _POLICIES[precision]

    def undo() -> None:
        while changed:
            layer, policy = changed.pop()
            layer.dtype_policy = policy

    return undo


def check_model(model: Any) -> None:
    """Raise a UserError when no variable of `model` can learn."""
    if not model.trainable_variables:
        total = len(model.variables)
        raise UserError(
            "the model has no trainable parameters",
            field="model",
            got=f"{type(model).__name__} with {total} variables, all frozen"
            if total
            else f"{type(model).__name__} without variables",
            remedy="Set layer.trainable = True on the layers that should learn",
        )


def check_compiled(model: Any, optimizer: Any, loss: Any) -> None:
    """Refuse the compiled model of a factory where its optimizer or loss would not be used: the planner needs
    the learning rate before a rank builds the model.

    Args:
        model: what the factory built.
        optimizer: the trainer's, or None.
        loss: the trainer's loss or training step, or None.

    Raises:
        UserError: the model brings one that the trainer has not been given.
    """
    ignored = [
        f"{name}={value if isinstance(value, str) else type(value).__name__}"
        for name, value, given in (
            ("optimizer", getattr(model, "optimizer", None), optimizer),
            ("loss", getattr(model, "loss", None), loss),
        )
        if getattr(model, "compiled", False) and value is not None and given is None
    ]
    if ignored:
        raise UserError(
            "the function given as model returns a compiled model, whose optimizer and loss would be ignored",
            field="model",
            got=", ".join(ignored),
            allowed="a compiled model itself, or a function that returns a model without compile()",
            remedy="Pass optimizer= and loss_fn= to the trainer, or give the model instead of the function",
        )


def seed_states(model: Any) -> list[Any]:
    """The state variables of the model's random layers."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            found[id(generator.state)] = generator.state
    return list(found.values())


def widest(model: Any) -> str:
    """``float64`` when a trainable variable is, else ``float32``."""
    return "float64" if any(v.dtype == "float64" for v in model.trainable_variables) else "float32"


# -- travelling ----------------------------------------------------------------------------


@dataclass
class Packed:
    """A Keras object as configuration and values; rebuilt inside the strategy's scope.

    Attributes:
        config: Keras's own serialized form.
        custom: classes that are not Keras's, by their registered names.
        values: values of its variables in their order; None where it has none yet.
    """

    config: Any
    custom: dict[str, Any]
    values: list[np.ndarray[Any, Any]] | None = None

    def unpack(self) -> Any:
        """Rebuild it here; `fill` it once it has its variables."""
        with keras.saving.custom_object_scope(self.custom):
            return keras.saving.deserialize_keras_object(self.config, safe_mode=False)

    def fill(self, built: Any) -> None:
        """Put the values into what `unpack` gave."""
        if self.values is not None:
            for variable, value in zip(built.variables, self.values, strict=True):
                variable.assign(value)


class PackedModel(Packed):
    """A Keras model; it has values if it is built."""

    @classmethod
    def of(cls, model: Any) -> PackedModel:
        """Take a model apart.

        Raises:
            UserError: Keras cannot serialize it.
        """
        try:
            config = keras.saving.serialize_keras_object(model)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise UserError(
                f"Keras cannot serialize the model, so it cannot be sent to the ranks: {error}",
                field="model",
                got=type(model).__name__,
                remedy="Give a function that builds it, or a get_config method",
            ) from error
        config.pop("compile_config", None)
        layers = model._flatten_layers()
        custom = {type(part).__name__: type(part) for part in layers if framework_alone(part)}
        weights = [to_array(v) for v in model.variables] if is_built(model) else None
        return cls(config, custom, weights)


def framework_alone(part: Any) -> bool:
    """Whether the class of `part` is a custom one, which Keras needs as an argument."""
    return type(part).__module__.split(".")[0] not in ("keras", "tensorflow", "tf_keras")


class PackedOptimizer(Packed):
    """A Keras optimizer; it has values if it is built."""

    @classmethod
    def of(cls, optimizer: Any) -> PackedOptimizer:
        """Take an optimizer apart."""
        config = keras.saving.serialize_keras_object(optimizer)
        custom = {type(optimizer).__name__: type(optimizer)} if framework_alone(optimizer) else {}
        return cls(config, custom, [to_array(v) for v in optimizer.variables] if optimizer.built else None)


class PackedLoss(Packed):
    """A Keras loss or metric object as configuration alone."""

    @classmethod
    def of(cls, loss: Any) -> PackedLoss:
        """Take it apart."""
        custom = {type(loss).__name__: type(loss)} if framework_alone(loss) else {}
        return cls(keras.saving.serialize_keras_object(loss), custom)


def unpack(value: Any) -> Any:
    """Rebuild a packed object; return anything else unchanged."""
    return value.unpack() if isinstance(value, Packed) else value
