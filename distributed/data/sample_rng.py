"""Augmentation randomness as a function of (seed, epoch, sample), whatever reads it."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import Dataset

from distributed.data.order import mix

__all__ = ["PerSampleRng"]


class PerSampleRng(Dataset[Any]):
    """Wraps a map-style dataset; asked with ``(epoch, index)``.

    Seeds `random`, NumPy's global generator and torch's CPU generator before each sample
    and puts them back afterwards, so that dropout in the same process is not disturbed.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed = mix(self.seed, epoch, index, 2)
        numpy = sys.modules.get("numpy")
        saved = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            return self.dataset[index]
        finally:
            random.setstate(saved[0])
            torch.set_rng_state(saved[1])
            if numpy:
                numpy.random.set_state(saved[2])
