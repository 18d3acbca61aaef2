"""Values that no writer of this project produces, and structure-aware changes of JSON with them."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["RAW", "dump", "mutate", "paths_of"]

RAW = "@@RAW:"
"""Beginning of a string that `dump` writes as the JSON text behind it, which `json` would not write."""

_DTYPES = (
    "quint8",
    "qint32",
    "bits8",
    "float32",
    "int64",
    "bool",
    "uint8",
    "complex128",
    "Tensor",
    "device",
    "",
)
_TEXTS = (
    "../secret",
    "/etc/passwd",
    "a/b",
    ".",
    "..",
    "a\x00b",
    "\ud800",
    "\x1b[2J",
    "manifest.json",
    "x" * 50_000,
)
_NUMBERS = (-1, 0, 1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**40, -(2**63), 0.5, -0.0, 1e300)
_RAWS = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1" * 5000,
    "-0",
    "1E5",
    "[" * 300 + "]" * 300,
    '{"a":1,"a":2}',
)
_TAGGED = (
    {"$": "tensor", "dtype": "quint8", "shape": [4], "v": "AAAAAA=="},
    {"$": "tensor", "dtype": "float32", "shape": [2**40], "v": "AAAAAA=="},
    {"$": "tensor", "dtype": "float32", "shape": [-1], "v": "AAAAAA=="},
    {"$": "tensor", "dtype": "float32", "shape": [1], "v": "AAAAAA=="},
    {"$": "ndarray", "dtype": "|O8", "shape": [1], "v": "AAAAAAAAAAA="},
    {"$": "ndarray", "dtype": "<U4000000", "shape": [1], "v": ""},
    {"$": "ndarray", "dtype": "<U1", "shape": [1], "v": "/////w=="},
    {"$": "scalar", "dtype": "<f8", "shape": [], "v": "AAAAAAAA8D8="},
    {"$": "int", "v": "0x" + "f" * 20_000},
    {"$": "int", "v": "7"},
    {"$": "float", "v": "1e999"},
    {"$": "float", "v": "nan"},
    {"$": "bytes", "v": "!!"},
    {"$": "tuple", "v": "abc"},
    {"$": "tuple", "v": [1]},
    {"$": "set", "v": [[]]},
    {"$": "dict", "v": [[1, 2], [1, 3]]},
    {"$": "dict", "v": [[{"$": "tuple", "v": [1]}, 2]]},
    {"$": "Counter", "v": 7},
    {"$": "os.system", "v": "true"},
    {"$": ["tensor"]},
)

Path = tuple[Any, ...]


def paths_of(tree: Any, prefix: Path = ()) -> Iterator[Path]:
    """The place of every value below the top."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from paths_of(value, (*prefix, key))


def mutate(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy of `tree` with one to three changes, and what they are."""
    tree, done = copy.deepcopy(tree), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = list(paths_of(tree))
        if not paths:
            break
        # Long lists, such as of random numbers, would take most of the changes.
        depth = rng.randint(1, max(map(len, paths)))
        path = rng.choice([path for path in paths if len(path) <= depth])
        done.append(f"{_change(tree, path, rng)} at {'.'.join(map(str, path))}")
    return tree, "; ".join(done)


def dump(tree: Any) -> str:
    """`tree` as JSON, with the texts behind `RAW` as they are."""
    text = json.dumps(tree, separators=(",", ":"))
    strings = rf'"{RAW}((?:[^"\\]++|\\.)*+)"'
    return re.sub(strings, lambda found: json.loads(f'"{found[1]}"'), text)


def _change(tree: Any, path: Path, rng: random.Random) -> str:
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, value = path[-1], parent[path[-1]]
    kind = rng.choice(("replace", "replace", "near", "near", "remove", "repeat", "swap", "wrap"))
    if kind == "remove":
        del parent[key]
    elif kind == "repeat" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    elif kind == "repeat":
        parent[f"{key}2"] = copy.deepcopy(value)
    elif kind == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], value
    elif kind == "wrap":
        parent[key] = rng.choice(([value], {"v": value}, {"$": "tuple", "v": [value]}, [value] * 50))
    elif kind == "near":
        parent[key] = _near(value, rng)
    else:
        parent[key] = _hostile(rng)
    return kind


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None, 0, 1))
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 2**40, float(value), str(value)))
    if isinstance(value, str) and value:
        place = rng.randrange(len(value))
        changed = value[:place] + rng.choice("0aZ./$\n") + value[place + 1 :]
        return rng.choice((changed, value[:place], value + value, value.upper(), rng.choice(_DTYPES)))
    if isinstance(value, list):
        return rng.choice((value[::-1], value[1:], [*value, 1], value * 3, [1, *value], [0], []))
    return {} if isinstance(value, dict) else _hostile(rng)


def _hostile(rng: random.Random) -> Any:
    some: tuple[Any, ...] = (None, True, [], {}, [[]], [{}], _nested(rng.choice((20, 90, 250, 900))))
    choices = (some, _DTYPES, _TEXTS, _NUMBERS, tuple(RAW + text for text in _RAWS), _TAGGED)
    return copy.deepcopy(rng.choice(rng.choice(choices)))


def _nested(depth: int) -> Any:
    if depth > 300:  # What copies and walks through the tree recurses.
        return f"{RAW}{'[' * depth}1{']' * depth}"
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value
