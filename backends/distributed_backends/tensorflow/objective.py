"""The loss and metrics of a Keras model, as (sum, count) pairs (C2, C5).

- No loss: cross-entropy from logits over class indices, -100 masked, as under torch.
- A Keras loss: called as Keras calls it, ``(y_true, y_pred)``, unreduced; what its `ignore_class`
  or a mask leaves out is not counted. Sample weights multiply losses and do not change the count.
- A function ``(output, target)`` or a training step: a mean over the micro-batch's samples, or
  its result ``(sum, count)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from distributed.errors import UserError

__all__ = ["Objective", "accuracy", "is_keras_loss", "keras_loss"]

IGNORED = -100
Terms = tuple[Any, Any]


class Objective:
    """The loss and metrics of a task.

    Args:
        loss_fn: as in `Task`, or a Keras loss.
        training_step: as in `Task`.
        metrics: as in `Task`; Keras metrics that are means are read too.
        validation_step: as in `Task`.
    """

    def __init__(
        self,
        loss_fn: Any = None,
        training_step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        validation_step: Callable[..., Any] | None = None,
    ) -> None:
        self._loss_fn = keras_loss(loss_fn) if is_keras_loss(loss_fn) else converted(loss_fn)
        self._training_step, self._validation_step = converted(training_step), converted(validation_step)
        if metrics is None and training_step is None and _classifies(self._loss_fn):
            metrics = {"accuracy": accuracy}
        self.metrics = {name: _metric(name, metric) for name, metric in (metrics or {}).items()}

    def check(self, model: Any) -> None:
        """Raise a UserError when the model's probabilities would be taken for logits."""
        last = model.layers[-1] if getattr(model, "layers", None) else model
        activation = getattr(getattr(last, "activation", None), "__name__", type(last).__name__)
        if self._loss_fn is None and self._training_step is None and activation.lower() == "softmax":
            raise UserError(
                "the model ends in a softmax, but the default loss reads logits",
                field="loss_fn",
                got="None",
                remedy="Give loss_fn='sparse_categorical_crossentropy', or leave the softmax out",
            )

    def __call__(self, model: Any, batch: Any, number: Any, training: bool) -> Terms:
        """(sum of losses, count) of a micro-batch; regularisation losses are part of its mean.

        Args:
            number: number of its samples, a scalar tensor; 0 for a stand-in, which does not count.
            training: mode of the layers.
        """
        called = _Called(model, training)
        if self._training_step is not None:
            terms = self._read(self._training_step(called, batch), number)
        else:
            inputs, target, weights = split_batch(batch)
            terms = self._terms(called(inputs), target, weights, number)
        return _alive(_with_regularisation(model, terms), number)

    def evaluate(self, model: Any, batch: Any, number: Any) -> dict[str, Terms]:
        """``{name: (sum, count)}`` in float64, of the loss and every metric."""
        called = _Called(model, False)
        if self._validation_step is not None:
            found = dict(self._validation_step(called, batch))
        elif self._training_step is not None:
            found = {"loss": self(model, batch, number, False)}
        else:
            inputs, target, weights = split_batch(batch)
            output = called(inputs)
            found = {"loss": _with_regularisation(model, self._terms(output, target, weights, number))}
            for name, metric in self.metrics.items():
                found[name] = metric(output, target)
        return {name: _alive(terms, number) for name, terms in found.items()}

    def _terms(self, output: Any, target: Any, weights: Any, number: Any) -> Terms:
        output = tf.nest.map_structure(_widened, output)
        if self._loss_fn is None:
            return _cross_entropy(output, target, weights)
        if isinstance(self._loss_fn, keras.losses.Loss):
            return _keras_terms(self._loss_fn, output, target, weights)
        if weights is not None:
            raise UserError(
                "the loss function does not accept the sample weights in the batches",
                field="loss_fn",
                got="batches of (input, target, weight)",
                remedy="Give a Keras loss, or training_step",
            )
        return self._read(self._loss_fn(output, target), number)

    def _read(self, result: Any, number: Any) -> Terms:
        if isinstance(result, tuple) and len(result) == 2:
            return result
        result = tf.convert_to_tensor(result)
        if result.shape.rank == 0:
            result = _widened(result)
            return result * tf.cast(number, result.dtype), number
        raise UserError(
            "a loss must be one number",
            field="training_step" if self._training_step else "loss_fn",
            got=tuple(result.shape),
            allowed="a 0-dimensional tensor (the mean of the micro-batch), or (sum, count)",
            remedy="Call tf.reduce_mean on a loss per sample",
        )


class _Called:
    """A model whose calls know that they train: a user's step need not pass it."""

    def __init__(self, model: Any, training: bool) -> None:
        self._model, self._training = model, training

    def __call__(self, *args: Any, **options: Any) -> Any:
        options.setdefault("training", self._training)
        return self._model(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def converted(function: Any) -> Any:
    """A user's function with Python's ``if`` and ``for`` over tensors made part of the graph."""
    if function is None:
        return None
    internal = tf.__internal__.autograph
    return internal.tf_convert(function, internal.control_status_ctx(), convert_by_default=True)


def split_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Keras's own forms: ``(x, y)`` or ``(x, y, sample_weight)``; `x` may be a tuple or a mapping.

    Raises:
        UserError: another form.
    """
    if isinstance(batch, (tuple, list)) and len(batch) in (2, 3):
        return batch[0], batch[1], batch[2] if len(batch) == 3 else None
    raise UserError(
        "cannot separate inputs from target in a batch",
        field="train_loader",
        got=f"a batch of type {type(batch).__name__}"
        + (f" and length {len(batch)}" if isinstance(batch, (tuple, list)) else ""),
        allowed="(input, target) or (input, target, sample weight); several inputs as a tuple or mapping",
        remedy="Give training_step=lambda model, batch: ... for batches of another form",
    )


def accuracy(output: Any, target: Any) -> Terms:
    """(correct, counted) over targets that are not -100."""
    target = _as_classes(output, target)
    if target.dtype.is_floating:
        target = tf.argmax(target, axis=-1)
    kept = tf.not_equal(target, tf.cast(IGNORED, target.dtype))
    if output.shape[-1] == 1:
        chosen = tf.cast(output[..., 0] > 0.5, target.dtype)
    else:
        chosen = tf.argmax(output, axis=-1, output_type=tf.int64)
    right = tf.logical_and(tf.equal(tf.cast(chosen, target.dtype), target), kept)
    return tf.math.count_nonzero(right), tf.math.count_nonzero(kept)


def is_keras_loss(loss_fn: Any) -> bool:
    """Whether it is called as Keras calls its losses, ``(y_true, y_pred)``."""
    if isinstance(loss_fn, (str, keras.losses.Loss)) or hasattr(loss_fn, "keras_signature"):
        return True
    return str(getattr(loss_fn, "__module__", "")).split(".")[0] in ("keras", "tf_keras")


def keras_loss(loss_fn: Any) -> Any:
    """A Keras loss object from a name, a function or an object.

    Raises:
        UserError: it sums where its mean is needed, or is none.
    """
    if isinstance(loss_fn, type):
        loss_fn = loss_fn()
    try:
        found = keras.losses.get(loss_fn)
    except ValueError as error:
        raise UserError(str(error).splitlines()[0], field="loss_fn", got=loss_fn) from None
    if not isinstance(found, keras.losses.Loss):
        found = _Function(found)
    if found.reduction == "sum":
        raise UserError(
            "the loss must return the micro-batch mean so that it can be reweighted by sample count",
            field="loss_fn",
            got="reduction='sum'",
            allowed="reduction='sum_over_batch_size'",
            remedy="Or give a function that returns (sum, count)",
        )
    return found


class _Function(keras.losses.Loss):  # type: ignore[misc]
    """A function ``(y_true, y_pred)`` that returns a loss per sample."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name=getattr(function, "__name__", "loss"))
        self.function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Losses of shape (N, ...)."""
        return self.function(y_true, y_pred)


def _classifies(loss_fn: Any) -> bool:
    names = ("CategoricalCrossentropy", "SparseCategoricalCrossentropy", "categorical_crossentropy")
    kind = type(loss_fn).__name__
    return loss_fn is None or kind in names or str(getattr(loss_fn, "name", "")).endswith(names[-1])


def _cross_entropy(output: Any, target: Any, weights: Any) -> Terms:
    target = _as_classes(output, target)
    if target.dtype.is_floating:
        losses = tf.nn.softmax_cross_entropy_with_logits(tf.cast(target, output.dtype), output)
        return _weighed(losses, weights), tf.size(losses)
    kept = tf.not_equal(target, tf.cast(IGNORED, target.dtype))
    classes = tf.where(kept, target, tf.zeros_like(target))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, output)
    losses *= tf.cast(kept, losses.dtype)
    return _weighed(losses, weights), tf.math.count_nonzero(kept)


def _keras_terms(loss: Any, output: Any, target: Any, weights: Any) -> Terms:
    losses = loss.call(target, output)
    masks = [getattr(part, "_keras_mask", None) for part in (output, losses)]
    count = tf.size(losses)
    for mask in masks:
        if mask is not None:
            mask = tf.broadcast_to(tf.reshape(mask, tf.shape(mask)[: losses.shape.rank]), tf.shape(losses))
            losses *= tf.cast(mask, losses.dtype)
            count = tf.math.count_nonzero(mask)
    return _weighed(losses, weights), count


def _weighed(losses: Any, weights: Any) -> Any:
    if weights is not None:
        weights = tf.cast(weights, losses.dtype)
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * 8], 0)[: losses.shape.rank])
        losses *= weights
    return tf.reduce_sum(losses)


def _with_regularisation(model: Any, terms: Terms) -> Terms:
    total, count = terms
    penalties = getattr(model, "losses", None)
    if penalties:
        total += tf.add_n([tf.cast(p, total.dtype) for p in penalties]) * tf.cast(count, total.dtype)
    return total, count


def _alive(terms: Terms, number: Any) -> Terms:
    """Nothing of a stand-in's, in widths that lose no sample."""
    total, count = (tf.convert_to_tensor(term) for term in terms)
    alive = tf.greater(number, 0)
    return total * tf.cast(alive, total.dtype), count * tf.cast(alive, count.dtype)


def _as_classes(output: Any, target: Any) -> Any:
    """Class indices of shape (N, 1) as (N,), as Keras reads them."""
    if target.shape.rank == output.shape.rank and target.shape[-1] == 1 and output.shape[-1] != 1:
        return tf.squeeze(target, -1)
    return target


def _widened(value: Any) -> Any:
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def _metric(name: str, metric: Any) -> Callable[..., Any]:
    if not isinstance(metric, (str, keras.metrics.Metric)):
        function: Callable[..., Any] = accuracy if metric is accuracy else converted(metric)
        return function
    found = keras.metrics.get(metric)
    if isinstance(found, keras.metrics.MeanMetricWrapper):
        return _MeanMetric(found)
    if not isinstance(found, keras.metrics.Metric) and callable(found):
        return _MeanMetric(keras.metrics.MeanMetricWrapper(found))
    raise UserError(
        "a metric that is not a mean over samples cannot be reduced over ranks",
        field="metrics",
        got=f"{name}: {type(found).__name__}",
        allowed="a function (output, target) -> (sum, count), or a Keras metric that is a mean",
    )


class _MeanMetric:
    """A Keras metric that is a mean over samples, as (sum, count)."""

    def __init__(self, metric: Any) -> None:
        self._fn, self._options = metric._fn, dict(metric._fn_kwargs)

    def __call__(self, output: Any, target: Any) -> Terms:
        values = self._fn(target, output, **self._options)
        return tf.reduce_sum(values), tf.size(values)
