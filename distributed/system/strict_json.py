"""Parse JSON of unknown origin with bounded depth and memory."""

from __future__ import annotations

import json
import math
from collections import Counter
from reprlib import Repr
from typing import Any

from distributed.system.garbage_collection import paused

__all__ = ["MAX_DEPTH", "MAX_VALUES", "check_depth", "count_marks", "parse_json", "shown"]

MAX_DEPTH = 200
"""Lists and objects inside each other; what walks through the result may recurse."""

MAX_VALUES = 1 << 24
"""Brackets, commas, colons and quotes of a text: its values take some 50 bytes of memory for each."""

_LARGEST = 2**63
_CONTAINERS = (dict, list)
_BYTES = {'{"': 184, "[": 56}
"""Memory of the smallest mapping that is not empty, and of a list. Strings may hold brackets too, of which
`MAX_VALUES` allows less than 1 GB."""
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
    # None of the values is garbage, and collections would take most of the time.
    with paused():
        try:
            # Seconds pass until small objects have used up a limit of memory; one large one fails at once.
            bytearray(sum(_occurrences(text, mark) * size for mark, size in _BYTES.items()))
            value = json.loads(
                text,
                object_pairs_hook=_without_duplicates,
                parse_constant=_refuse_constant,
                parse_float=_finite,
                parse_int=_small,
            )
            check_depth(value)
        except MemoryError:
            raise ValueError("there is no memory for its values") from None
        except RecursionError:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
        return value


def count_marks(text: str | bytes | bytearray) -> int:
    """Characters of a JSON text that separate values, those within strings included."""
    return sum(_occurrences(text, mark) for mark in '[{,:"')


def check_depth(value: Any, limit: int = MAX_DEPTH) -> None:
    """Raise a ValueError when lists and mappings in `value` are nested deeper than `limit`."""
    level: list[Any] = [[value]]
    for _ in range(limit + 2):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if child and isinstance(child, _CONTAINERS)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {limit} levels")


def shown(value: object) -> str:
    """`value` on one short line, for a message."""
    return _shorten.repr(value)


def _occurrences(text: str | bytes | bytearray, mark: str) -> int:
    return text.count(mark) if isinstance(text, str) else text.count(mark.encode())


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is set twice")
    return found


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
