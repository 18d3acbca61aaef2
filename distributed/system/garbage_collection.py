"""Tune Python's garbage collector: collect rarely during imports and not while files are parsed, and skip
framework objects in training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 100_000
"""New objects between two collections. With Python's 700, they take a fifth of ``import torch``."""
_usual: tuple[int, int, int] | None = None


def spare_imports() -> None:
    """Collect rarely until `collect_as_usual`. For ranks, and the command line's process."""
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Undo `spare_imports`, unless the threshold was changed since."""
    global _usual
    if _usual is not None and gc.get_threshold()[0] == _RARELY:
        gc.set_threshold(*_usual)
    _usual = None


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from collection, because walking a framework's million objects every few
    hundred steps finds no garbage."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing while many objects are made that are all kept, such as the values of a file."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
