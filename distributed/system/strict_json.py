"""Parse JSON of unknown origin with bounded depth and memory."""

from __future__ import annotations

import json
import math
from reprlib import Repr
from typing import Any

__all__ = ["MAX_DEPTH", "MAX_VALUES", "check_depth", "count_marks", "parse_json", "shown"]

MAX_DEPTH = 200
"""Lists and objects inside each other; what walks through the result may recurse."""

MAX_VALUES = 1 << 24
"""Brackets, commas, colons and quotes of a text: its values take some 50 bytes of memory for each."""

_LARGEST = 2**63
_shorten = Repr()
_shorten.maxstring = _shorten.maxother = 60
_shorten.maxlevel = 2


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text that `json.dumps` with ``allow_nan=False`` may have written.

    Raises:
        ValueError: it is no such text: a key is set twice, a number is not finite or is an integer of more
            than 64 bits, or it is nested deeper than `MAX_DEPTH` or larger than `MAX_VALUES`.
    """
    if count_marks(text) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_small,
        )
    except MemoryError:
        raise ValueError("there is no memory for its values") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    check_depth(value)
    return value


def count_marks(text: str | bytes | bytearray) -> int:
    """Characters of a JSON text that separate values, those within strings included."""
    marks = '[{,:"'
    if isinstance(text, str):
        return sum(text.count(mark) for mark in marks)
    return sum(text.count(mark.encode()) for mark in marks)


def check_depth(value: Any, limit: int = MAX_DEPTH) -> None:
    """Raise a ValueError when lists and mappings in `value` are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit + 1):
        level = [child for item in level for child in _containers(item)]
        if not level:
            return
    raise ValueError(f"nested deeper than {limit} levels")


def shown(value: object) -> str:
    """`value` on one short line, for a message."""
    return _shorten.repr(value)


def _containers(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if item and isinstance(item, (dict, list))]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs if len(dict(pairs)) != len(pairs) else ():
        if name in found:
            raise ValueError(f"the key {shown(name)} is set twice")
        found[name] = value
    return found or dict(pairs)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"the number {text} is not finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]} is not finite")
    return value


def _small(text: str) -> int:
    value = int(text) if len(text) < 21 else _LARGEST
    if not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"the integer {text[:30]} has more than 64 bits")
    return value
