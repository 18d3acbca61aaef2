"""Copies of the user's batches and samplers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

__all__ = ["copied"]


def copied(value: Any, shared: Iterable[Any] = ()) -> Any:
    """Return a deep copy of `value`, or `value` itself if it cannot be copied, as generators and tensors with
    a graph cannot.

    Args:
        shared: objects that the copy holds as they are.
    """
    try:
        return copy.deepcopy(value, {id(part): part for part in shared})
    except Exception:  # noqa: BLE001 - objects of the user's classes raise anything
        return value
