"""Read dumps of torch's Flight Recorder: the collectives that a rank has called, and their states.

The format is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, version 2: a pickle of plain
containers. Process groups of NCCL and of gloo are recorded. gloo's sends and receives are not.
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["OFF", "Collective", "FlightRecord", "parse_dump", "read_record"]

OFF = b"off"
"""Content of a dump file whose rank has its recorder switched off."""
MAX_BYTES = 64 * 2**20
"""Largest dump that is read or kept. One of 2,000 entries with stacks takes about 3 MB."""

_DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
}
"""torch's name of a dtype in dumps -> its Python name and bytes per element."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Collective:
    """One collective, or one send or receive, that a rank has called.

    Attributes:
        group: unique name of the process group within the run.
        description: description of the group, as ``default_pg`` or the name of a mesh axis.
        number: sequence number within the group, from 1; collectives and point-to-point operations are
            counted apart.
        operation: name without the transport, as ``all_reduce``.
        inputs: shape of each input tensor.
        outputs: shape of each output tensor.
        dtypes: torch's names of the inputs' dtypes, or without inputs of the outputs'.
        state: ``scheduled``, ``started`` or ``completed``; ``ended`` for gloo, which does not record
            whether an operation succeeded.
        point_to_point: whether it is a send or a receive.
    """

    group: str
    description: str
    number: int
    operation: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    point_to_point: bool = False

    @property
    def completed(self) -> bool:
        """Whether the rank waits in it no longer."""
        return self.state in ("completed", "ended")

    def describe(self) -> str:
        """``all_reduce #118 of group 'dp' (25.0 MiB float32)``."""
        size = self._size()
        return f"{self.operation} #{self.number} of group '{self.description}'{f' ({size})' if size else ''}"

    def _size(self) -> str:
        names = sorted({_DTYPES.get(name, (name, 0))[0] for name in self.dtypes})
        if not names:
            return ""
        shapes = self.inputs or self.outputs
        widths = [_DTYPES.get(name, (name, 0))[1] for name in self.dtypes]
        if len(widths) != len(shapes) or 0 in widths:
            return ", ".join(names)
        size = sum(math.prod(shape) * width for shape, width in zip(shapes, widths, strict=True))
        return f"{_bytes(size)} {', '.join(names)}"


@dataclass(frozen=True)
class FlightRecord:
    """The record of one rank.

    Attributes:
        collectives: in the order of their calls; the recorder keeps the last ones only.
        members: unique name of a group -> its ranks, where torch has recorded them (NCCL).
        problem: clause on what is wrong with the record, as ``its dump is truncated``; empty without one.
    """

    rank: int
    collectives: Sequence[Collective] = ()
    members: Mapping[str, frozenset[int]] = field(default_factory=dict)
    problem: str = ""

    @property
    def last(self) -> Collective | None:
        """The collective that the rank is in, or was in last: the first of its last group that it has not
        finished, otherwise the one called last."""
        open_ones = [one for one in self.collectives if not one.completed]
        return open_ones[0] if open_ones else self.collectives[-1] if self.collectives else None


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for containers, numbers and text alone: a dump cannot name a function or a class."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump holds plain values only")


def parse_dump(data: bytes, rank: int) -> FlightRecord:
    """The record in `data`, a pickle of torch's. No code in it is run.

    Returns:
        A record with `FlightRecord.problem` if the data is truncated, or of another format.
    """
    if data == OFF:
        return FlightRecord(rank, problem="its Flight Recorder is off (TORCH_FR_BUFFER_SIZE=0)")
    if not data:
        return FlightRecord(rank)
    try:
        dump = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 - damaged bytes may raise anything
        return FlightRecord(rank, problem=f"its dump is truncated or damaged ({_line(error)})")
    try:
        version = str(dump["version"])
        if version.partition(".")[0] != "2":
            return FlightRecord(rank, problem=f"its dump has version {version}; version 2 can be read")
        entries = [_collective(entry) for entry in dump["entries"]]
        return FlightRecord(rank, entries, dict(_members(dump.get("pg_config") or {})))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return FlightRecord(rank, problem=f"its dump has an unknown format ({_line(error)})")


def read_record(paths: Iterable[Path], rank: int, fresh: bool = True) -> FlightRecord | None:
    """The record in the newest file of `paths`; None without a file.

    Args:
        fresh: whether that file was written for this report; otherwise its age is the record's problem.
    """
    found = [(path.stat().st_mtime, path) for path in paths if path.exists()]
    if not found:
        return None
    written, path = max(found)
    if path.stat().st_size > MAX_BYTES:
        return FlightRecord(rank, problem=f"its dump is larger than {_bytes(MAX_BYTES)}")
    record = parse_dump(path.read_bytes(), rank)
    if fresh or record.problem:
        return record
    age = max(0.0, time.time() - written)
    return FlightRecord(rank, record.collectives, record.members, f"its dump is out of date by {age:.0f} s")


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    transport, _, operation = str(entry["profiling_name"]).rpartition(":")
    point_to_point = bool(entry["is_p2p"])
    # gloo records no events, but retires an operation that has ended, with success or without.
    retired = transport == "gloo" and entry["retired"] is True
    return Collective(
        str(name),
        str(description) if description not in ("", "undefined") else str(name),
        int(entry["p2p_seq_id" if point_to_point else "collective_seq_id"]),
        operation,
        _shapes(entry["input_sizes"]),
        _shapes(entry["output_sizes"]),
        tuple(str(dtype) for dtype in entry["input_dtypes"] or entry["output_dtypes"]),
        "ended" if retired else str(entry["state"]),
        point_to_point,
    )


def _shapes(sizes: Iterable[Iterable[Any]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(length) for length in shape) for shape in sizes)


def _members(groups: Mapping[Any, Any]) -> Iterable[tuple[str, frozenset[int]]]:
    for name, group in groups.items():
        text = str(group.get("ranks", "")).strip("[] ")
        if name and text:
            yield str(name), frozenset(int(rank) for rank in text.split(","))


def _bytes(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:120]
