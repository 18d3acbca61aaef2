"""The state of every random number generator that a training script is likely to use."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def capture_rng() -> dict[str, Any]:
    """Generators of Python, NumPy (when imported), torch on the CPU and on this rank's CUDA device.

    The values are what `distributed.checkpoint.codec` encodes.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the state of `capture_rng`. A generator that was not captured is left unchanged."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def same_rng(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two states of `capture_rng` draw the same numbers; None is a state of its own."""
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def check_rng(state: Any) -> None:
    """Raise a ValueError unless `restore_rng` accepts `state`; no generator of this process changes."""
    try:
        _set_copies(state)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"no state of random number generators: {error!r}") from None


def _set_copies(state: Any) -> None:
    random.Random(0).setstate(state["python"])
    if not isinstance(state["python"][2], float | int | None):
        raise ValueError("the next number of Python's generator is no number")
    torch.Generator().set_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.RandomState(0).set_state(state["numpy"])
    if "cuda" in state and (state["cuda"].dtype != torch.uint8 or state["cuda"].dim() != 1):
        raise ValueError("the state of CUDA's generator is not of bytes")


@contextmanager
def same_streams() -> Iterator[None]:
    """Leave random streams as they were."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
