"""Compare two checkpoints by name, bits or distances; export a rank's state right after loading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, cast

import torch

from distributed.checkpoint.optimizer_state import IMPLEMENTATION
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.callback import Callback, Context
from distributed.training.mixins.checkpointing import CheckpointingMixin

_OF_CODECS = re.compile(r"(replica\.\d+\.of\.\d+\.)?compression\.")
"""Keys of the tensors that `distributed.training.compression` saves."""


class ExportOnLoad(Callback):
    """Export the ranks' state after loading and before the first step, as a checkpoint.

    Args:
        directory: output directory; created when missing.
    """

    all_ranks = True

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_run_start(self, context: Context) -> None:
        """Every rank exports; rank 0 commits."""
        cast(CheckpointingMixin, context).export_to(self.directory)


def state_differences(first: str, second: str) -> list[str]:
    """Differences between two checkpoints, one line each; empty when all bits are equal by name.

    Compared are tensors by name and key (dtype, shape, bits), the optimizer's groups with their
    hyper-parameters, its scalars, the gradient scaler, the scheduler and the progress. How they are
    sharded over ranks and files does not count, nor which implementation of a step a group selects
    (``fused``, ``foreach``...), nor which of a tied tensor's names holds it, nor what a gradient codec has
    still to send: other ranks share it in another way.

    Raises:
        UserError: one of them is missing or damaged.
    """
    with closing(PortableReader(first)) as a, closing(PortableReader(second)) as b:
        return list(_differences(a, b))


def state_distance(first: str, second: str) -> float:
    """Largest absolute difference of any number in the tensors of two checkpoints: weights, buffers and the
    optimizer's state, by name.

    Raises:
        UserError: one of them is missing or damaged.
        ValueError: names, shapes, or scalars of the optimizer (such as its steps) are not the same.
    """
    with closing(PortableReader(first)) as a, closing(PortableReader(second)) as b:
        for what, mine, other in (("shapes", _shapes(a), _shapes(b)), ("scalars", _scalars(a), _scalars(b))):
            if not _same(mine, other):
                raise ValueError(f"different {what}: {_shortened(mine)} and {_shortened(other)}")
        ours, theirs = _by_first_name(a), _by_first_name(b)
        return max(
            float((a.read(key, ours[key, name]) - b.read(key, theirs[key, name])).abs().max())
            for key, name in ours
        )


def _differences(a: PortableReader, b: PortableReader) -> Iterator[str]:
    yield from _tensor_differences(a, b)
    for what, ours, theirs in (
        ("parameter groups", _groups(a), _groups(b)),
        ("scalars", _scalars(a), _scalars(b)),
        ("tied names", set(a.aliases), set(b.aliases)),
        ("scaler", a.scaler, b.scaler),
        *((name, a.extra[name], b.extra[name]) for name in ("progress", "scheduler")),
    ):
        if not _same(ours, theirs):
            yield f"{what}: {_shortened(ours)} and {_shortened(theirs)}"


def _tensor_differences(a: PortableReader, b: PortableReader) -> Iterator[str]:
    ours, theirs = _by_first_name(a), _by_first_name(b)
    for key, name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{key} '{name}': in the {'first' if (key, name) in ours else 'second'} alone"
    for key, name in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[key, name], theirs[key, name]
        if a.tensors()[key, mine] != b.tensors()[key, other]:
            yield f"{key} '{name}': shapes {a.tensors()[key, mine]} and {b.tensors()[key, other]}"
        elif a.dtype(key, mine) != b.dtype(key, other):
            yield f"{key} '{name}': {a.dtype(key, mine)} and {b.dtype(key, other)}"
        else:
            x, y = a.read(key, mine).view(torch.uint8), b.read(key, other).view(torch.uint8)
            if not torch.equal(x, y):
                yield f"{key} '{name}': {int((x != y).sum())} of {len(x)} bytes"


def _first_names(reader: PortableReader) -> dict[str, str]:
    """A tied tensor's names -> the alphabetically first of them."""
    tied: dict[str, list[str]] = {}
    for alias, owner in reader.aliases.items():
        tied.setdefault(owner, [owner]).append(alias)
    return {name: min(names) for names in tied.values() for name in names}


def _by_first_name(reader: PortableReader) -> dict[tuple[str, str], str]:
    first = _first_names(reader)
    compared = [(key, name) for key, name in reader.tensors() if not _OF_CODECS.match(key)]
    return {(key, first.get(name, name)): name for key, name in compared}


def _shapes(reader: PortableReader) -> dict[tuple[str, str], tuple[int, ...]]:
    shapes = reader.tensors()
    return {(key, first): shapes[key, name] for (key, first), name in _by_first_name(reader).items()}


def _groups(reader: PortableReader) -> list[dict[str, Any]]:
    first = _first_names(reader)
    return [
        {key: value for key, value in group.items() if key not in IMPLEMENTATION}
        | {"names": sorted(first.get(name, name) for name in group["names"])}
        for group in reader.groups
    ]


def _scalars(reader: PortableReader) -> dict[str, Mapping[str, Any]]:
    first = _first_names(reader)
    return {first.get(name, name): slots for name, slots in reader.scalars.items() if slots}


def _same(a: Any, b: Any) -> bool:
    """Equal in value and type, tensors included; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b or (a != a and b != b))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
