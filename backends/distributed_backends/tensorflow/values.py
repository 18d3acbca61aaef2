"""Values on the host: of Keras variables, whatever strategy they were made under, and of batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def to_array(value: Any) -> np.ndarray[Any, Any]:
    """A variable or tensor as an array; of one that devices mirror, the first copy. No collective."""
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def as_array(value: Any) -> Any:
    """A torch tensor, a NumPy array or a number as an array; a TensorFlow tensor as it is."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value if isinstance(value, tf.Tensor) else np.asarray(value)


def as_tensors(batch: Any) -> Any:
    """A batch as TensorFlow's tensors, its lists as tuples."""
    if isinstance(batch, dict):
        return {key: as_tensors(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map(as_tensors, batch))
    if tf.nest.is_nested(batch):  # such as a UserDict, which stays one
        return tf.nest.map_structure(as_tensors, batch)
    return tf.convert_to_tensor(as_array(batch))


def tupled(batch: Any) -> Any:
    """Collated lists as tuples: their parts are arguments, not a stack."""
    if isinstance(batch, dict):
        return {key: tupled(value) for key, value in batch.items()}
    return tuple(map(tupled, batch)) if isinstance(batch, (list, tuple)) else batch
