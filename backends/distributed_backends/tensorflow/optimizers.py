"""Optimizers of a Keras model: the user's own, or torch's arithmetic where the config names one.

Keras's Adam puts epsilon elsewhere than torch's, its SGD folds the learning rate into the momentum,
and its `weight_decay` is never the L2 penalty. ``optimizer: adamw`` means the same training under
every backend, so that what the config names is built here after torch's formulas
(torch.optim.SGD, Adam and AdamW).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf
import torch
from keras import ops

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.framework import refuse_foreign
from distributed_backends.tensorflow.values import to_array


class RateHolder(torch.optim.Optimizer):
    """Optimizer for schedules and the loop: one group, whose rate is passed to the Keras optimizer.

    It has torch's form so that built-in schedules, and a user's torch schedulers, count and are
    saved as under every other backend.

    Args:
        optimizer: the Keras optimizer.
        asked: configured learning rate, which Keras may hold rounded to float32.

    Attributes:
        keras: the optimizer that trains.
    """

    def __init__(self, optimizer: Any, asked: float) -> None:
        # torch's own __init__ would import its compiler, for seconds, and prepare for parameters.
        self.keras = optimizer
        self.defaults: dict[str, Any] = {}
        self.state: Any = {}
        rate = self.rate()
        self.param_groups = [{"params": [], "lr": asked if math.isclose(rate, asked, rel_tol=1e-7) else rate}]

    def rate(self) -> float:
        """The Keras optimizer's learning rate at its present step."""
        return float(to_array(self.keras.learning_rate))

    def write_rate(self) -> None:
        """Give the Keras optimizer the group's rate, unless it follows a schedule of its own."""
        if not has_schedule(self.keras):
            self.keras.learning_rate = self.param_groups[0]["lr"]

    def read_rate(self) -> None:
        """Take the rate that the script has given the Keras optimizer, which may hold float32."""
        if not math.isclose(self.rate(), self.param_groups[0]["lr"], rel_tol=1e-7):
            self.param_groups[0]["lr"] = self.rate()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the compiled step has moved the weights."""


class SGD(keras.optimizers.Optimizer):  # type: ignore[misc]
    """torch.optim.SGD: ``buffer = momentum * buffer + gradient``, the L2 penalty in the gradient.

    Args:
        momentum: 0 keeps no buffer.
        l2: torch's `weight_decay`.
    """

    def __init__(
        self, learning_rate: float = 1e-3, momentum: float = 0.0, l2: float = 0.0, name: str = "sgd"
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.momentum, self.l2 = momentum, l2
        self.momentum_buffer: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        """Make the buffers."""
        if not self.built:
            super().build(variables)
            if self.momentum:
                self.momentum_buffer = self.add_optimizer_variables(variables, "momentum_buffer")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        step = _penalised(gradient, variable, self.l2)
        if _has_kernel(variable):
            self._apply_kernel(step, variable, rate)
            return
        if self.momentum:
            buffer = self.momentum_buffer[self._get_variable_index(variable)]
            # A plain number takes the buffer's width; ops.cast would round it to float32 first.
            self.assign(buffer, self.momentum * buffer + step)
            step = ops.convert_to_tensor(buffer)
        self.assign_sub(variable, rate * step)

    def _apply_kernel(self, step: Any, variable: Any, rate: Any) -> None:
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=step)
            return
        buffer = self.momentum_buffer[self._get_variable_index(variable)].value
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=buffer.handle,
            lr=rate,
            grad=step,
            momentum=tf.constant(self.momentum, variable.dtype),
        )

    def get_config(self) -> dict[str, Any]:
        """Arguments that rebuild it."""
        base: dict[str, Any] = super().get_config()
        own = {"momentum": self.momentum, "l2": self.l2, "name": self.name}
        return {"learning_rate": base["learning_rate"], **own}


class Adam(keras.optimizers.Optimizer):  # type: ignore[misc]
    """torch.optim.Adam and AdamW: epsilon is added to the root of the corrected second moment.

    Args:
        decay: decoupled weight decay, AdamW's.
        l2: penalty in the gradient, Adam's `weight_decay`.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: torch's default, 1e-8.
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        decay: float = 0.0,
        l2: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        name: str = "adam",
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.decay, self.l2 = decay, l2
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.exp_avg: list[Any] = []
        self.exp_avg_sq: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        """Make the moments."""
        if not self.built:
            super().build(variables)
            self.exp_avg = self.add_optimizer_variables(variables, "exp_avg")
            self.exp_avg_sq = self.add_optimizer_variables(variables, "exp_avg_sq")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable."""
        dtype = variable.dtype
        rate, index = ops.cast(learning_rate, dtype), self._get_variable_index(variable)
        first, second = self.exp_avg[index], self.exp_avg_sq[index]
        step = ops.cast(self.iterations + 1, dtype)
        gradient = _penalised(gradient, variable, self.l2)
        if self.decay:
            self.assign(variable, variable * (1 - rate * self.decay))
        if _has_kernel(variable):
            self._apply_kernel(gradient, variable, first.value, second.value, learning_rate)
            return
        self.assign(first, first + (gradient - first) * (1 - self.beta_1))
        self.assign(second, self.beta_2 * second + (1 - self.beta_2) * ops.square(gradient))
        root = ops.sqrt(second) / ops.sqrt(1 - _power(self.beta_2, step))
        rate /= 1 - _power(self.beta_1, step)
        self.assign_sub(variable, rate * first / (root + self.epsilon))

    def _apply_kernel(self, gradient: Any, variable: Any, first: Any, second: Any, rate: Any) -> None:
        """TensorFlow's kernel, which divides by ``sqrt(second) + epsilon``: torch divides the root by its
        correction first, so that rate and epsilon are given multiplied by it. As powers of zero, the kernel's
        own corrections are one."""
        dtype = variable.dtype
        step = tf.cast(self.iterations, tf.float64) + 1.0
        correction = tf.sqrt(1.0 - _power(self.beta_2, step))
        alpha = tf.cast(rate, tf.float64) * correction / (1.0 - _power(self.beta_1, step))
        zero = tf.zeros((), dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.handle,
            v=second.handle,
            beta1_power=zero,
            beta2_power=zero,
            lr=tf.cast(alpha, dtype),
            beta1=tf.constant(self.beta_1, dtype),
            beta2=tf.constant(self.beta_2, dtype),
            epsilon=tf.cast(self.epsilon * correction, dtype),
            grad=gradient,
        )

    def get_config(self) -> dict[str, Any]:
        """Arguments that rebuild it."""
        base: dict[str, Any] = super().get_config()
        own = {key: getattr(self, key) for key in ("decay", "l2", "beta_1", "beta_2", "epsilon", "name")}
        return {"learning_rate": base["learning_rate"], **own}


def _power(base: float, exponent: Any) -> Any:
    return ops.exp(exponent * math.log(base))


def _has_kernel(variable: Any) -> bool:
    """Whether TensorFlow's own kernels, a single pass over a weight and its state, hold its width."""
    return tf.as_dtype(variable.dtype) in (tf.float32, tf.float64)


def _penalised(gradient: Any, variable: Any, l2: float) -> Any:
    gradient = ops.cast(gradient, variable.dtype)
    return gradient + l2 * variable if l2 else gradient


def build_optimizer(optimizer: Any, model: Any, config: DistributedConfig, learning_rate: float) -> Any:
    """The user's Keras optimizer, or one built here, over no variables yet.

    Args:
        optimizer: a Keras optimizer, its class or a `functools.partial` of one (called with
            ``learning_rate``), a function from the model to an optimizer, or None.
        model: argument of a function.
        config: names the optimizer when none is given.
        learning_rate: after `lr_scaling`.

    Raises:
        UserError: no optimizer, one that brings a rate which `lr_scaling` cannot rescale, or one that
            does the work of the loop itself.
    """
    own_rate = True
    if optimizer is None:
        optimizer, own_rate = _named(config, learning_rate), False
    inner = optimizer.func if isinstance(optimizer, partial) else optimizer
    if isinstance(inner, type) and issubclass(inner, keras.optimizers.Optimizer):
        own_rate = isinstance(optimizer, partial) and "learning_rate" in optimizer.keywords
        optimizer = optimizer(**({} if own_rate else {"learning_rate": learning_rate}))
    elif not isinstance(optimizer, keras.optimizers.Optimizer) and callable(optimizer):
        refuse_foreign(optimizer, "optimizer", "tensorflow")
        optimizer = optimizer(model)
    _check(optimizer)
    if own_rate and config.lr_scaling.rule != "none":
        raise UserError(
            "the optimizer given sets its own learning rate, which is never rescaled",
            field="lr_scaling.rule",
            got=config.lr_scaling.rule,
            remedy="Give the optimizer's class (optimizer=keras.optimizers.SGD) and learning_rate",
        )
    return optimizer


def _named(config: DistributedConfig, rate: float) -> Any:
    decay = config.weight_decay
    if config.optimizer == "sgd":
        return SGD(rate, momentum=config.momentum, l2=decay)
    return Adam(rate, decay=decay) if config.optimizer == "adamw" else Adam(rate, l2=decay)


def _check(optimizer: Any) -> None:
    refuse_foreign(optimizer, "optimizer", "tensorflow")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(
            "not an optimizer",
            field="optimizer",
            got=type(optimizer).__name__,
            allowed="a Keras optimizer, its class, or a function from the model to one",
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UserError(
            "the loss would be scaled twice",
            field="optimizer",
            got="LossScaleOptimizer",
            remedy="Give the inner optimizer, and mixed_precision='fp16'",
        )
    if optimizer.gradient_accumulation_steps:
        raise UserError(
            "gradients would be accumulated twice, the second time by calls instead of samples",
            field="optimizer",
            got=f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}",
            remedy="Set gradient_accumulation_steps in the configuration instead",
        )


def check_optimizer(optimizer: Any, model: Any) -> None:
    """Raise a UserError when `optimizer` was built over variables that are not `model`'s."""
    if not optimizer.built:
        return
    known = {id(v) for v in model.trainable_variables}
    held = list(optimizer._trainable_variables)
    foreign = [v for v in held if id(v) not in known]
    if foreign:
        raise UserError(
            f"the optimizer was built over other variables: {len(foreign)} of its {len(held)} are not"
            " the model's",
            field="optimizer",
            got=type(optimizer).__name__,
            remedy="Give a fresh optimizer, or its class",
        )


def has_schedule(optimizer: Any) -> bool:
    """Whether the Keras optimizer carries a LearningRateSchedule, which counts its own steps."""
    schedules = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(getattr(optimizer, "_learning_rate", None), schedules)


@contextmanager
def in_width(dtype: str) -> Iterator[None]:
    """Keras's default float is `dtype` inside: a float32 learning rate would blur float64 weights."""
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
