"""Writes the files of one checkpoint into a directory that is not committed yet."""

from __future__ import annotations

import math
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distributed._version import __version__
from distributed.checkpoint.chunk_index import ITEM_SIZES, ChunkEntry, tiling_problems
from distributed.checkpoint.codec import decode, encode
from distributed.checkpoint.file_names import FORMAT, MERGED, VERSION, rank_file, shard_file
from distributed.checkpoint.filesystem import FileLayer, seal
from distributed.errors import UserError
from distributed.interfaces.state import BackendState, Chunk
from distributed.system.boxes import first_element

_PIECE = 64 << 20
"""Bytes under one checksum at most, so that who needs a part of a large tensor reads little more."""


_MANY = 64
"""Ranks above which their indexes are merged."""
_LARGEST_MERGED = 64 << 20
_MERGED = ("format", "version", "rank", "world_size", "chunks")


def write_rank(
    files: FileLayer, directory: str, rank: int, size: int, state: BackendState, rank_extra: dict[str, Any]
) -> None:
    """Write one rank's shard and index, and bring them to the disk. The index takes its name
    last: where it is, all of the rank's bytes are.

    Raises:
        OSError: a file cannot be written.
        UserError: the state holds what the format cannot.
    """
    extra = encode(rank_extra, "rank_extra")
    shard = shard_file(rank, size)
    entries, facts = _write_shard(files, os.path.join(directory, shard), state.chunks)
    index = {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": size,
        "chunks": [entry.to_json() for entry in entries],
        "scalars": encode(state.scalars, "optimizer"),
        "scalar_dtypes": [group.get("scalar_dtypes", {}) for group in state.groups],
        "rank_extra": extra,
        "shard": facts,
    }
    path = os.path.join(directory, rank_file(rank))
    # Rank 0 brings the names to the disk before it commits.
    files.publish(path, seal(index), f"{path}.part")


def _write_shard(files: FileLayer, path: str, chunks: list[Chunk]) -> tuple[list[ChunkEntry], dict[str, Any]]:
    entries, offset, crc = [], 0, 0
    with files.open(path) as file:
        for entry, raw in _pieces(chunks, os.path.basename(path)):
            files.write(file, raw)
            entries.append(entry)
            offset, crc = offset + len(raw), zlib.crc32(raw, crc)
        files.fsync(file)
    return entries, {"size": offset, "crc32": crc}


def entries_of(chunks: Iterable[Chunk], file: str) -> list[ChunkEntry]:
    """What the index says of `chunks` once they are written to the shard `file`."""
    return [entry for entry, _ in _pieces(chunks, file)]


def _pieces(chunks: Iterable[Chunk], file: str) -> Iterator[tuple[ChunkEntry, memoryview]]:
    """The chunks in turn as they lie in `file`, none larger than `_PIECE`."""
    offset = 0
    for chunk in chunks:
        for piece in _small(chunk):
            entry, raw = _entry(piece, file, offset)
            yield entry, raw
            offset += len(raw)


def _small(chunk: Chunk) -> Iterator[Chunk]:
    """`chunk` in pieces of at most `_PIECE` bytes: ranges, or boxes of some of its first dimension."""
    row = math.prod(chunk.lengths[1:]) if chunk.lengths else 1
    size = ITEM_SIZES.get(str(chunk.data.dtype).removeprefix("torch."), 1) * max(row, 1)
    length = max(_PIECE // size, 1) * row
    for first in range(0, max(len(chunk.data), 1), max(length, 1)):
        data = chunk.data[first : first + length]
        if not chunk.lengths:
            yield replace(chunk, start=chunk.start + first, data=data)
            continue
        offsets = (chunk.offsets[0] + first // row, *chunk.offsets[1:])
        lengths = (len(data) // row, *chunk.lengths[1:])
        start = first_element(chunk.shape, offsets)
        yield replace(chunk, start=start, data=data, offsets=offsets, lengths=lengths)


def _entry(chunk: Chunk, file: str, offset: int) -> tuple[ChunkEntry, memoryview]:
    dtype = str(chunk.data.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise UserError(
            f"'{chunk.name}' ({chunk.key}) has a dtype that the checkpoint format does not know",
            got=dtype,
            allowed=", ".join(sorted(ITEM_SIZES)),
        )
    flat = not chunk.lengths
    whole = (math.prod(chunk.shape),) if flat else chunk.shape
    offsets, lengths = ((chunk.start,), (len(chunk.data),)) if flat else (chunk.offsets, chunk.lengths)
    inside = all(o + n <= size for o, n, size in zip(offsets, lengths, whole, strict=True))
    if chunk.data.dim() != 1 or math.prod(lengths) != len(chunk.data) or not inside:
        raise ValueError(
            f"chunk of '{chunk.name}' ({chunk.key}) at {offsets} of lengths {lengths} with data of shape"
            f" {tuple(chunk.data.shape)} is not a piece of {chunk.shape}"
        )
    if sys.byteorder != "little":
        raise UserError(
            "portable checkpoints hold little-endian bytes, and this machine is big-endian",
            field="checkpoint_dir",
            remedy="Train without checkpoint_dir on this machine",
        )
    import torch

    raw = memoryview(chunk.data.detach().contiguous().view(torch.uint8).numpy().data)
    entry = ChunkEntry(
        chunk.key,
        chunk.name,
        tuple(chunk.shape),
        dtype,
        tuple(offsets),
        tuple(lengths),
        "flat" if flat else "nd",
        file,
        offset,
        zlib.crc32(raw),
    )
    return entry, raw


def manifest_of(
    step: int,
    state: BackendState,
    extra: dict[str, Any],
    facts: dict[str, dict[str, Any]],
    entries: list[ChunkEntry],
    size: int,
    folder: str = "",
) -> dict[str, Any]:
    """The manifest of what all ranks wrote; the files lie in `folder` beside it.

    Raises:
        ValueError: the pieces do not tile every tensor exactly.
        UserError: `extra`, the groups or the scalars hold what the codec cannot.
    """
    problems = tiling_problems(entries)
    if problems:
        raise ValueError(f"the ranks' pieces do not make whole tensors: {'; '.join(problems[:3])}")
    tensors = {(e.key, e.name): e for e in entries}
    return {
        "format": FORMAT,
        "version": VERSION,
        "byte_order": "little",
        "step": step,
        "world_size": size,
        "versions": _versions(),
        "tensors": [
            {"key": e.key, "name": e.name, "shape": list(e.shape), "dtype": e.dtype} for e in tensors.values()
        ],
        "indexes": [rank_file(rank) for rank in range(size)],
        "groups": encode(state.groups, "groups"),
        "scalars": encode(state.scalars, "optimizer"),
        "aliases": dict(state.aliases),
        "scaler": encode(state.scaler, "scaler"),
        "extra": {key: encode(value, key) for key, value in extra.items()},
        "files": facts,
        **({"index": MERGED} if MERGED in facts else {}),
        **({"folder": folder} if folder else {}),
    }


def merge_indexes(
    indexes: Sequence[Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]]
) -> bytes | None:
    """The content of `MERGED`: where every piece lies, and the records, of all ranks, so that a rank that
    resumes opens one file and not one for each rank. None for few ranks, and for indexes that are too large.

    Args:
        indexes: rank -> index.
        facts: name -> size and checksum of the ranks' files.
    """
    size = sum(facts[rank_file(rank)]["size"] for rank in range(len(indexes)))
    if len(indexes) <= _MANY or size > _LARGEST_MERGED:
        return None
    ranks = [{**{name: index[name] for name in _MERGED}, "rank_extra": _records(index)} for index in indexes]
    return seal({"format": FORMAT, "version": VERSION, "ranks": ranks})


def _records(index: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks need of what one rank saved for itself."""
    return {name: value for name, value in index["rank_extra"].items() if name == "records"}


def merge_scalars(state: BackendState, indexes: Iterable[dict[str, Any]]) -> None:
    """Complete rank 0's `state` with the scalars that other ranks alone know; a lower rank's win."""
    for index in indexes:
        state.scalars = decode(index["scalars"]) | state.scalars
        for group, dtypes in zip(state.groups, index["scalar_dtypes"], strict=True):
            if dtypes:
                group["scalar_dtypes"] = dtypes | group.get("scalar_dtypes", {})


def _versions() -> dict[str, str]:
    torch = sys.modules.get("torch")
    versions = {"distributed": __version__, "python": sys.version.split()[0]}
    return {**versions, "torch": str(torch.__version__)} if torch is not None else versions
