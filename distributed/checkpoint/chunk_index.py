"""Where in a tensor, and where in a file, each piece lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from distributed.system.boxes import ranges_of
from distributed.system.strict_json import shown

ITEM_SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of every dtype the format knows, by torch's name."""


LARGEST = 2**63 - 1
"""Of every count, offset and number of elements."""
_MAX_DIMENSIONS = 64


def is_shape(value: Any) -> bool:
    """Whether `value` is a list of sizes with which torch can make a tensor."""
    return (
        type(value) is list
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= LARGEST for size in value)
        # Strides are computed as if no dimension were empty.
        and math.prod(size or 1 for size in value) <= LARGEST
    )


def is_count(value: Any) -> bool:
    """Whether `value` is an integer of 0 to `LARGEST`."""
    return type(value) is int and 0 <= value <= LARGEST


@dataclass(frozen=True)
class ChunkEntry:
    """One piece of one tensor, as the index of a rank describes it.

    Attributes:
        key: ``model``, ``optimizer.<slot>`` or another namespace.
        shape: of the whole tensor.
        dtype: torch's name for it, e.g. ``bfloat16``.
        offsets: where the piece starts: one number in the flattened tensor (view ``flat``), or
            one per dimension (view ``nd``: a box, as tensor parallelism cuts it).
        lengths: its extent, likewise.
        view: ``flat`` or ``nd``.
        file: name of the shard file in the checkpoint's directory.
        offset: first byte in it.
        crc32: of the piece's bytes, which are row-major and little-endian.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    view: str
    file: str
    offset: int
    crc32: int

    @property
    def count(self) -> int:
        """Elements in the piece."""
        return math.prod(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes in the piece."""
        return self.count * ITEM_SIZES[self.dtype]

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """The piece as runs that are contiguous in the flattened tensor, in ascending order:
        (first element in the tensor, first element in the piece, number of elements)."""
        if self.view == "flat":
            yield self.offsets[0], 0, self.lengths[0]
        elif self.count:
            yield from ranges_of(self.shape, self.offsets, self.lengths)

    def to_json(self) -> dict[str, Any]:
        """One entry of ``rank_NNNNN.json``."""
        place: dict[str, Any] = {"offsets": list(self.offsets), "lengths": list(self.lengths)}
        if self.view == "flat":
            place = {"start": self.offsets[0], "length": self.lengths[0]}
        return {
            "key": self.key,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "view": self.view,
            **place,
            "file": self.file,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "crc32": self.crc32,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ChunkEntry:
        """The inverse of `to_json`.

        Raises:
            ValueError: not an entry of this format, or one that reaches beyond its tensor.
        """
        try:
            flat = data["view"] == "flat"
            offsets = [data["start"]] if flat else data["offsets"]
            lengths = [data["length"]] if flat else data["lengths"]
            entry = cls(
                data["key"],
                data["name"],
                tuple(data["shape"]),
                data["dtype"],
                tuple(offsets),
                tuple(lengths),
                data["view"],
                data["file"],
                data["offset"],
                data["crc32"],
            )
            entry._check_types()
            entry._check_place(data["nbytes"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed chunk: {error!r}") from None
        return entry

    def _check_types(self) -> None:
        for text in (self.key, self.name, self.file):
            if not isinstance(text, str):
                raise ValueError(f"a chunk's key, name or file is {shown(text)}")
        if self.view not in ("flat", "nd"):
            raise ValueError(f"unknown view {shown(self.view)} of {shown(self.name)}")
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {shown(self.dtype)} of {shown(self.name)}")
        numbers = (*self.offsets, *self.lengths, self.offset, self.crc32)
        if not is_shape(list(self.shape)) or not all(map(is_count, numbers)):
            raise ValueError(f"a place in {shown(self.name)} is not a whole number of 64 bits")

    def _check_place(self, nbytes: Any) -> None:
        whole = (math.prod(self.shape),) if self.view == "flat" else self.shape
        inside = all(o + n <= w for o, n, w in zip(self.offsets, self.lengths, whole, strict=False))
        if not len(self.offsets) == len(self.lengths) == len(whole) or not inside:
            raise ValueError(f"a chunk reaches beyond {shown(self.name)} of shape {self.shape}")
        if not is_count(nbytes) or nbytes != self.nbytes:
            raise ValueError(f"a chunk of {shown(self.name)} has {shown(nbytes)} bytes, needs {self.nbytes}")


def tiling_problems(entries: Iterable[ChunkEntry]) -> list[str]:
    """What keeps `entries` from covering each of their tensors exactly once; empty if nothing."""
    tensors: dict[tuple[str, str], list[ChunkEntry]] = {}
    for entry in entries:
        tensors.setdefault((entry.key, entry.name), []).append(entry)
    return [text for (key, name), pieces in tensors.items() if (text := _gap(f"{key} '{name}'", pieces))]


def _gap(tensor: str, pieces: list[ChunkEntry]) -> str | None:
    kinds = {(piece.shape, piece.dtype) for piece in pieces}
    if len(kinds) > 1:
        return f"{tensor}: ranks disagree on its shape or dtype: {sorted(map(str, kinds))}"
    position = 0
    for start, _, count in sorted(run for piece in pieces for run in piece.segments() if run[2]):
        if start != position:
            what = "written twice" if start < position else "missing"
            return f"{tensor}: elements {min(start, position)} to {max(start, position)} are {what}"
        position += count
    total = math.prod(pieces[0].shape)
    return None if position == total else f"{tensor}: elements {position} to {total} are missing"
