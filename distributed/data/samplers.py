"""Properties of samplers that users bring: their parts, copies, sizes, and shares of the data."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from distributed.data.copies import copied
from distributed.data.sample_rng import RandomStreams

__all__ = ["are_parts", "copied_sampler", "inner_samplers", "length_of", "size_of_batches"]

_LOOKED_AT = 256
"""Batches whose size is looked at before a run."""
_SHARED = 1 << 12
"""Parts of a list of the dataset that a copy of a sampler shares."""
_FIRST = 8
"""Elements of a list that are looked at for samplers."""
_CHANCE = 1e-4
"""Probability below which ranks that draw different samples are taken to draw parts of the data."""


def inner_samplers(sampler: Any) -> list[Any]:
    """`sampler`, and the samplers from which it draws."""
    found = [sampler]
    for part in found:
        values = list(getattr(part, "__dict__", {}).values())
        values += [one for value in values if isinstance(value, (list, tuple)) for one in value[:_FIRST]]
        inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
        inner += [value for value in values if isinstance(value, Sampler)]
        for each in inner:
            if each is not None and all(each is not one for one in found):
                found.append(each)
    return found


def length_of(data: Any) -> int | None:
    """Length as `data` states it; None where it has none, or not yet."""
    try:
        return len(data)
    except Exception:  # noqa: BLE001 - whatever a class of the user raises
        return None


def size_of_batches(batches: Any, dataset: Any) -> int | None:
    """Size of a batch sampler's batches but the last, as a copy of it draws them; None if they differ."""
    drawing = copied_sampler(batches, dataset)
    sizes: list[int] = []
    with RandomStreams(0), suppress(Exception):  # a class that needs set_epoch first, or a length
        sizes = [] if drawing is batches else [len(list(b)) for b in islice(drawing, _LOOKED_AT)]
    whole = set(sizes[:-1] if len(sizes) < _LOOKED_AT else sizes) or set(sizes)
    return whole.pop() if len(whole) == 1 and max(sizes) in whole else None


def copied_sampler(sampler: Any, dataset: Any) -> Any:
    """A copy that shares the dataset and what it holds; the sampler itself where it cannot be copied."""
    shared = [dataset, *getattr(dataset, "__dict__", {}).values()]
    shared += [
        part for values in shared[1:] if isinstance(values, (list, tuple)) for part in values[:_SHARED]
    ]
    return copied(sampler, shared)


def are_parts(one: set[str], other: set[str], total: int, ranks: int) -> bool:
    """Two sets of `total` samples have no more in common than padding, which is unlikely by chance."""
    common = len(one & other)
    # The hypergeometric distribution: of `other`, drawn at random, at most `common` are in `one`.
    size, drawn = len(one), len(other)
    if not one or not other or common > ranks:
        return False
    terms = (
        _log_choices(size, k) + _log_choices(total - size, drawn - k) - _log_choices(total, drawn)
        for k in range(common + 1)
        if drawn - k <= total - size
    )
    return sum(map(math.exp, terms)) < _CHANCE


def _log_choices(number: int, taken: int) -> float:
    return math.lgamma(number + 1) - math.lgamma(taken + 1) - math.lgamma(number - taken + 1)
