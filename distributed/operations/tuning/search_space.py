"""Search spaces as plain YAML: ``{loguniform: [1e-4, 1e-2]}``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed.errors import UserError, did_you_mean

KINDS = {
    "choice": "one of the values in a list",
    "grid": "each of the values in a list, in a trial of its own",
    "uniform": "[low, high]",
    "loguniform": "[low, high], both above 0",
    "quniform": "[low, high, step]",
    "randint": "[low, high], high not included",
    "lograndint": "[low, high], both above 0, high not included",
    "normal": "[mean, standard deviation]",
}
"""Kind of range -> its values."""

_NUMBERS = {"quniform": 3}
_LISTS = ("choice", "grid")
_WHOLE = ("randint", "lograndint")
_POSITIVE = ("loguniform", "lograndint")


@dataclass(frozen=True)
class Range:
    """Range from which a parameter is sampled.

    Attributes:
        kind: a key of `KINDS`.
        values: arguments of the kind.
    """

    kind: str
    values: tuple[Any, ...]


def parse_space(space: Any) -> dict[str, Any]:
    """`space` with every plain range as a `Range`; values and an engine's own objects stay.

    Raises:
        UserError: not a mapping, empty, or an invalid range; names the parameter.
    """
    if not isinstance(space, Mapping) or not space:
        raise UserError(
            "a search needs parameters to sample",
            field="search_space",
            got=type(space).__name__ if space else space,
            allowed="names with ranges or values, e.g. {learning_rate: {loguniform: [1e-4, 1e-2]}}",
        )
    for name in space:
        if not isinstance(name, str) or not name:
            raise UserError("not a parameter name", field="search_space", got=name, allowed="a word")
    return {name: _parse(f"search_space.{name}", value) for name, value in space.items()}


def _parse(field: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((kind, given),) = value.items()
        kind = "grid" if kind == "grid_search" else kind
        if kind in KINDS:
            return _range(field, kind, given)
        guess = did_you_mean(str(kind), KINDS)
        if guess:
            raise UserError(
                f"'{kind}' is not a kind of range.{guess}",
                field=field,
                allowed=", ".join(KINDS),
                got=dict(value),
            )
    return {name: _parse(f"{field}.{name}", inner) for name, inner in value.items()}


def _range(field: str, kind: str, given: Any) -> Range:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise _wrong(field, kind, given)
    if kind in _LISTS:
        return Range(kind, tuple(given))
    values = tuple(_number(field, kind, value) for value in given)
    if len(values) != _NUMBERS.get(kind, 2):
        raise _wrong(field, kind, given)
    if kind == "normal":
        if values[1] <= 0:
            raise _wrong(field, kind, given)
        return Range(kind, values)
    if values[0] >= values[1] or (kind in _POSITIVE and values[0] <= 0):
        raise _wrong(field, kind, given)
    if kind in _WHOLE:
        values = tuple(int(value) for value in values)
    return Range(kind, values)


def _number(field: str, kind: str, value: Any) -> float:
    # YAML 1.1 reads 1e-4 as text.
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _wrong(field, kind, value) from None
    if isinstance(value, bool) or not math.isfinite(number) or (kind in _WHOLE and number != int(number)):
        raise _wrong(field, kind, value)
    return number


def _wrong(field: str, kind: str, given: Any) -> UserError:
    return UserError(f"{kind} wants {KINDS[kind]}", field=field, got=given)
