"""Plain values among the attributes of objects, by which a change of one object is noticed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["OF_MODULES", "PARTS", "plain_attributes"]

_OF_ENGINES = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")
"""Counters that engines keep in a model's modules (DeepSpeed 0.19)."""
OF_MODULES = frozenset([*vars(nn.Module()), *_OF_ENGINES])
"""Attributes of modules that are not a script's."""
_LEFT_OUT = OF_MODULES - {"training"}
PARTS = "the parts"
_SHORT = 256
"""Longer lists are data, which would take too long to compare around each event."""


def plain_attributes(holders: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``{attribute and holder in words: value}`` of numbers, texts and short lists of them, and the parts of
    modules.

    Args:
        holders: (name in words, object).
    """
    found: dict[str, Any] = {}
    for name, holder in holders:
        is_module = isinstance(holder, nn.Module)
        for attribute, value in vars(holder).items():
            if _is_plain(value) and not (is_module and attribute in _LEFT_OUT):
                found[f"'{attribute}' of {name}"] = list(value) if isinstance(value, list) else value
        if is_module:
            found[f"{PARTS} of {name}"] = list(map(id, holder._modules.values()))
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _SHORT and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
