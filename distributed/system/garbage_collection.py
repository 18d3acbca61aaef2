"""When Python looks for garbage: rarely while frameworks are imported, and while training not in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collect_as_usual", "frozen_heap", "spare_imports"]

_RARELY = 100_000
"""New objects between two looks. With Python's own 700, looking takes a fifth of ``import torch``."""
_usual: tuple[int, int, int] | None = None


def spare_imports() -> None:
    """Look rarely from now on, until `collect_as_usual`. For ranks, and the command line's process."""
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Take `spare_imports` back, unless somebody has set a threshold since."""
    global _usual
    if _usual is not None and gc.get_threshold()[0] == _RARELY:
        gc.set_threshold(*_usual)
    _usual = None


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Spare what exists: the collector would walk a framework's million objects every few hundred
    steps and find nothing."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
