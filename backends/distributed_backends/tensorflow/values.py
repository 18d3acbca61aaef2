"""Values of Keras variables on the host, whatever strategy they were made under."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

__all__ = ["to_array"]


def to_array(value: Any) -> np.ndarray[Any, Any]:
    """A variable or tensor as an array; of one that devices mirror, the first copy. No collective."""
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
