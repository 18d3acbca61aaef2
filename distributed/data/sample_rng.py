"""Randomness of data as a function of (seed, epoch, sample or stream), whatever reads it."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomStreams:
    """Lends `random`, NumPy's global generator and torch's CPU generator to a piece of work.

    Inside ``with`` the three are seeded with `seed`, or continue where the last ``with`` of this
    object ended; afterwards they are as they were, so that dropout in the same process is not
    disturbed. Generators of other devices are left alone.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._inside: Any = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self._inside is None:
            seed_all(self.seed)
        else:
            _put_back(self._inside)

    def __exit__(self, *exc: object) -> None:
        self._inside = _states()
        _put_back(self._outside)

    @property
    def state(self) -> Any:
        """Where the last ``with`` ended."""
        return self._inside

    def go_on_from(self, state: Any) -> None:
        """Let the next ``with`` begin where that of another object ended."""
        self._inside = state


def _states() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None


def _put_back(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def seed_all(seed: int) -> None:
    """Seed `random`, NumPy's global generator and torch's CPU generator."""
    random.seed(seed)
    # torch.manual_seed would seed the GPUs too, whose state is not put back.
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
