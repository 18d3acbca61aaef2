"""Whether two checkpoints hold the same training, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from distributed.checkpoint.random_state import same_rng
from distributed.checkpoint.reader import PortableReader


def differences(one: PortableReader, other: PortableReader) -> Iterator[str]:
    """Differences between two checkpoints, a line each; empty if training would continue identically.

    Compared by name: model, optimizer (tensors, numbers, groups), schedule, gradient scaler, progress
    and, where as many ranks saved both, every rank's random number generators. Bits decide: NaN
    equals the same NaN, and 0.0 is not -0.0. Configuration and versions are not compared.

    Raises:
        UserError: the stored bytes of one are damaged.
    """
    yield from _values("progress", one.extra["progress"], other.extra["progress"])
    yield from _tensors(one, other)
    for name in sorted(one.scalars.keys() | other.scalars.keys()):
        yield from _values(f"optimizer '{name}'", one.scalars.get(name, {}), other.scalars.get(name, {}))
    for what in ("groups", "aliases", "scaler"):
        yield from _value(what, getattr(one, what), getattr(other, what))
    yield from _value("scheduler", one.extra.get("scheduler"), other.extra.get("scheduler"))
    if one.world_size == other.world_size:
        for rank in range(one.world_size):
            pair = [(reader.rank_extra(rank) or {}).get("rng") for reader in (one, other)]
            if not same_rng(*pair):
                yield f"random number generators of rank {rank}"


def _tensors(one: PortableReader, other: PortableReader) -> Iterator[str]:
    ours, theirs = one.tensors(), other.tensors()
    for key, name in sorted(ours.keys() | theirs.keys()):
        what = f"{key} '{name}'"
        if (key, name) not in ours or (key, name) not in theirs:
            yield f"{what}: only in {(one if (key, name) in ours else other).path}"
            continue
        kinds = [(reader.dtype(key, name), tuple(reader.tensors()[key, name])) for reader in (one, other)]
        if kinds[0] != kinds[1]:
            yield f"{what}: {kinds[0]} and {kinds[1]}"
            continue
        yield from _bits(what, one.read(key, name), other.read(key, name))


def _bits(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[str]:
    width = ours.element_size()
    pair = [tensor.view(torch.uint8).view(-1, width) for tensor in (ours, theirs)]
    places = (pair[0] != pair[1]).any(dim=1).nonzero().flatten()
    if len(places):
        first = int(places[0])
        yield (
            f"{what}: {len(places)} of {len(ours)} elements, the first at {first}:"
            f" {ours[first].item()!r} and {theirs[first].item()!r}"
        )


def _values(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        yield from _value(f"{what} {name}", ours.get(name), theirs.get(name))


def _value(what: str, ours: Any, theirs: Any) -> Iterator[str]:
    # The repr of a number determines its bits, and only numbers and strings are compared.
    if repr(ours) != repr(theirs):
        yield f"{what}: {ours!r} and {theirs!r}"
