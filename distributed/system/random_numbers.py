"""Random numbers of libraries that run beside training, apart from those of training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["draw_apart"]


class _Apart(random.Random):
    """A generator that also has the classes of the module `random`, in whose place it is."""

    Random, SystemRandom = random.Random, random.SystemRandom


def draw_apart(names: Iterable[str]) -> None:
    """Give modules that draw from Python's generator one of their own.

    Args:
        names: of modules; those that are not imported are left out.
    """
    for name in names:
        module: Any = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = _Apart()
