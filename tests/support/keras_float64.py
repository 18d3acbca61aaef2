"""Keras in float64 for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["float64"]


@contextmanager
def float64() -> Iterator[None]:
    """Within the block, Keras makes layers and optimizers of float64.

    The first layer of a process sets the default policy of all later ones to the default float, so that this
    one alone would stay float64 for the tests behind it.
    """
    import keras

    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)
