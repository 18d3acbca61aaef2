"""Read a committed checkpoint: every hash is checked before use, and nothing is unpickled."""

from __future__ import annotations

import hashlib
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

from distributed.checkpoint.chunk_index import ITEM_SIZES, ChunkEntry, tiling_problems
from distributed.checkpoint.codec import decode_json
from distributed.checkpoint.file_names import FORMAT, MANIFEST, VERSION, rank_file
from distributed.checkpoint.filesystem import FileLayer, Ranges, unseal
from distributed.checkpoint.object_store import located
from distributed.checkpoint.schema import (
    EXTRA_STATE,
    Manifest,
    parse_entries,
    parse_manifest,
    parse_rank_extra,
    record_steps,
)
from distributed.errors import UserError
from distributed.interfaces.state import StateReader
from distributed.system.boxes import first_element, is_one_range, ranges_of
from distributed.system.strict_json import shown

__all__ = ["PortableReader", "check_files", "read_index", "read_manifest", "verify"]

T = TypeVar("T")
Range = tuple[int, int, int]
_REMEDY = "Resume from an older checkpoint, or restore the file from a copy"


def damaged(path: str, why: object) -> UserError:
    """The error for a file that is not what was written."""
    return UserError(f"the checkpoint is damaged: {path}: {why}", remedy=_REMEDY)


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest of the checkpoint in directory `path`; it is well-formed, and its hash and all file sizes
    agree.

    Raises:
        UserError: missing, incomplete, damaged, or of another format or version.
    """
    files, path = located(path)
    return _manifest(files, path)[0]


def _manifest(files: FileLayer, path: str) -> tuple[dict[str, Any], Manifest, str]:
    """(the manifest as it is written, the checked one, the directory of the files that it names)"""
    file = os.path.join(path, MANIFEST)
    content = _unsealed(file, _bytes_of(files, file))
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise UserError(
            f"{file} is not a checkpoint that this version reads",
            got=f"{shown(content.get('format'))} version {shown(content.get('version'))}",
            allowed=f"{FORMAT} version {VERSION}",
            remedy="Read it with the version of distributed-trainer that wrote it",
        )
    try:
        manifest = parse_manifest(content)
    except ValueError as error:
        raise damaged(file, f"malformed: {error}") from None
    folder = os.path.join(path, manifest.folder) if manifest.folder else path
    check_files(files, folder, manifest.files)
    return content, manifest, folder


def check_files(files: FileLayer, directory: str, facts: Mapping[str, dict[str, Any]]) -> None:
    """See that every file is there with its size.

    Raises:
        UserError: one is not.
    """
    try:
        sizes = files.sizes(directory)
    except ConnectionError:
        raise
    except OSError as error:
        raise damaged(directory, error.strerror) from None
    for name in facts:
        path, size = os.path.join(directory, name), facts[name]["size"]
        if name not in sizes:
            raise damaged(path, "it is missing, or not a regular file")
        if sizes[name] != size:
            raise damaged(path, f"it has {sizes[name]} bytes, and had {size} when it was written")


def read_index(files: FileLayer, path: str, sha256: str) -> dict[str, Any]:
    """A rank's index file, whose hash is known from the manifest.

    Raises:
        UserError: missing, damaged, or another checkpoint's.
    """
    raw = _bytes_of(files, path)
    index = _unsealed(path, raw)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise damaged(path, "it belongs to another checkpoint")
    return index


def verify(path: str, part: int = 0, parts: int = 1) -> list[str]:
    """Read a checkpoint completely and list its problems, one line each.

    A store that cannot be reached raises a ConnectionError instead.

    Args:
        path: its directory, or a URL.
        part: check only the `part`-th of `parts` shares of its files, so that ranks divide the
            work. The manifest, the sizes and the indexes are checked in every part.
        parts: into how many shares.
    """
    try:
        reader = PortableReader(path)
    except UserError as error:
        return [str(error)]
    return reader.problems(part, parts)


def _bytes_of(files: FileLayer, path: str) -> bytes:
    try:
        return files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no complete checkpoint: {path} is missing", remedy=_REMEDY) from None
    except ConnectionError:
        raise
    except OSError as error:
        raise damaged(path, error.strerror or error) from None


def _unsealed(path: str, raw: bytes) -> dict[str, Any]:
    try:
        return unseal(raw)
    except ValueError as error:
        raise damaged(path, error) from None


def _wrong_chunks(blocks: Iterator[bytes], entries: list[ChunkEntry]) -> Iterator[ChunkEntry]:
    """Those of `entries`, which cover a file in order, whose checksum is not that of their bytes."""
    block = memoryview(b"")
    for entry in entries:
        crc, missing = 0, entry.nbytes
        while missing:
            if not block:
                block = memoryview(next(blocks, b""))
                if not block:
                    break
            crc = zlib.crc32(block[:missing], crc)
            taken = min(missing, len(block))
            block, missing = block[taken:], missing - taken
        if missing or crc != entry.crc32:
            yield entry


class PortableReader(StateReader):
    """A committed checkpoint, opened.

    Attributes:
        path: its directory, absolute, or its URL.
        step: optimizer steps taken when it was saved.
        world_size: ranks that saved it.
        versions: of torch and of this package, when it was saved.
        extra: what all ranks shared: progress, scheduler, config.
        groups: the optimizer's hyper-parameter groups, with ``names``.
        scalars: per-parameter optimizer state that is no tensor: ``{name: {slot: value}}``.
        aliases: tied names -> the name that holds the tensor.
        scaler: gradient scaler state, or None.
        omitted: names of frozen parameters that were not saved -> digest of their values.

    Raises:
        UserError: it is missing, incomplete or damaged; the message names the file.
    """

    def __init__(self, path: str) -> None:
        self._files, self.path = located(path)
        _, self._manifest, self._folder = _manifest(self._files, self.path)
        manifest = self._manifest
        self.step, self.world_size, self.versions = manifest.step, manifest.world_size, manifest.versions
        self.extra, self.groups, self.scalars = manifest.extra, manifest.groups, manifest.scalars
        self.aliases, self.scaler = manifest.aliases, manifest.scaler
        self.omitted = self.extra.get("omitted") or {}
        self._entries: dict[tuple[str, str], list[ChunkEntry]] | None = None
        self._ranges: dict[str, Ranges] = {}
        self._checked: set[tuple[str, int]] = set()

    def tensors(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """``(key, name) -> shape`` of every tensor in the saved state."""
        return {tensor: shape for tensor, (shape, _) in self._manifest.tensors.items()}

    def dtype(self, key: str, name: str) -> str:
        """Torch's name of a tensor's dtype, e.g. ``bfloat16``. Raises KeyError."""
        return str(self._manifest.tensors[key, name][1])

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Any:
        """Elements ``start .. start + length`` of the flattened tensor, as a CPU torch tensor.

        Only the pieces that overlap the range are touched; each is checked once.

        Raises:
            KeyError: no such tensor.
            ValueError: the range reaches beyond the tensor.
            UserError: the stored bytes are damaged (checksum); names the file.
        """
        import torch

        shape, dtype = self._manifest.tensors[key, name]
        length = prod(shape) - start if length is None else length
        if start < 0 or length < 0 or start + length > prod(shape):
            raise ValueError(f"elements {start} to {start + length} are not in '{name}' of shape {shape}")
        try:
            out = torch.empty(length, dtype=getattr(torch, dtype))
        except RuntimeError:
            size = length * ITEM_SIZES[dtype]
            raise damaged(
                self.path, f"there is no memory for the {size:,} bytes of '{name}' ({key})"
            ) from None
        if length:
            self._fill(out.view(torch.uint8).numpy().data, key, name, [(start, 0, length)])
        return out

    def read_box(self, key: str, name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
        """As `StateReader.read_box`; only the pieces that overlap the box are touched."""
        import torch

        shape, dtype = self._manifest.tensors[key, name]
        if is_one_range(shape, lengths):
            return self.read(key, name, first_element(shape, offsets), prod(lengths)).reshape(lengths)
        if any(o < 0 or o + n > size for o, n, size in zip(offsets, lengths, shape, strict=True)):
            raise ValueError(f"the box at {offsets} of {lengths} is not in '{name}' of shape {shape}")
        out = torch.empty(lengths, dtype=getattr(torch, dtype))
        wanted = list(ranges_of(shape, offsets, lengths))
        self._fill(out.view(-1).view(torch.uint8).numpy().data, key, name, wanted)
        return out

    def rank_extra(self, rank: int) -> dict[str, Any] | None:
        """What rank `rank` saved for itself, None when there was no such rank.

        Raises:
            UserError: its index file is damaged.
        """
        if rank >= self.world_size:
            return None
        extra: dict[str, Any] = self._parsed(rank_file(rank), parse_rank_extra)
        return extra

    def entries(self) -> list[ChunkEntry]:
        """Every piece of every tensor, from all ranks' indexes.

        Raises:
            UserError: an index is damaged.
        """
        return [entry for pieces in self._index().values() for entry in pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of the files that the manifest names."""
        return sum(facts["size"] for facts in self._manifest.files.values())

    @property
    def saved_at(self) -> float:
        """When it was committed, in seconds since the epoch. Raises OSError."""
        return self._files.modified(os.path.join(self.path, MANIFEST))

    def close(self) -> None:
        """Release the mapped files. Reading again maps them again."""
        self._ranges.clear()

    def problems(self, part: int = 0, parts: int = 1) -> list[str]:
        """Read the checkpoint completely: see `verify`."""
        try:
            entries = self.entries()
            for rank in range(self.world_size)[part::parts]:
                self.rank_extra(rank)
        except UserError as error:
            return [str(error)]
        found = []
        for name in sorted(self._manifest.files)[part::parts]:
            if "crc32" in self._manifest.files[name]:
                found += self._shard_problems(name, [entry for entry in entries if entry.file == name])
        states = [name for key, name in self._manifest.tensors if key == EXTRA_STATE][part::parts]
        return found + [text for name in states if not found and (text := self._extra_state_problem(name))]

    def _extra_state_problem(self, name: str) -> str | None:
        import torch

        try:
            decode_json(self.read(EXTRA_STATE, name).view(torch.uint8).numpy().tobytes())
        except UserError as error:
            return str(error)
        except ValueError as error:
            return str(damaged(self.path, f"malformed: {EXTRA_STATE} '{name}': {error}"))
        return None

    def _shard_problems(self, name: str, entries: list[ChunkEntry]) -> list[str]:
        path, end = os.path.join(self._folder, name), 0
        ordered = sorted(entries, key=lambda entry: (entry.offset, entry.nbytes))
        for entry in [*ordered, None]:
            start = entry.offset if entry else self._manifest.files[name]["size"]
            if start != end:
                what = "to no tensor" if end < start else "to two tensors"
                return [str(damaged(path, f"bytes {min(start, end)} to {max(start, end)} belong {what}"))]
            end += entry.nbytes if entry else 0
        try:
            wrong = next(_wrong_chunks(self._files.blocks(path), ordered), None)
        except ConnectionError:
            raise
        except OSError as error:
            return [str(damaged(path, error.strerror or error))]
        if wrong is None:
            return []
        return [str(damaged(path, f"the checksum of '{wrong.name}' ({wrong.key}) does not match"))]

    def _index(self) -> dict[tuple[str, str], list[ChunkEntry]]:
        if self._entries is None:
            entries: dict[tuple[str, str], list[ChunkEntry]] = {}
            steps = set()
            for rank, (path, index) in enumerate(self._indexes()):
                num_steps, own = self._parse(path, index, partial(self._contents, rank=rank))
                steps.add(num_steps)
                for entry in own:
                    entries.setdefault((entry.key, entry.name), []).append(entry)
            self._check_whole(entries, steps)
            self._entries = entries
        return self._entries

    def _indexes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(file, index) of every rank; of many ranks from one file."""
        if not self._manifest.index:
            yield from (self._read(rank_file(rank)) for rank in range(self.world_size))
            return
        path, merged = self._read(self._manifest.index)
        ranks = merged.get("ranks")
        if not isinstance(ranks, list) or len(ranks) != self.world_size:
            raise damaged(path, f"malformed: it has no list of {self.world_size} ranks")
        for index in ranks:
            if not isinstance(index, dict):
                raise damaged(path, f"malformed: an index is {shown(index)}")
            yield path, index

    def _contents(self, index: dict[str, Any], rank: int) -> tuple[int | None, list[ChunkEntry]]:
        return record_steps(index), parse_entries(index, self._manifest, rank)

    def _check_whole(
        self, entries: Mapping[tuple[str, str], list[ChunkEntry]], steps: set[int | None]
    ) -> None:
        wrong = [
            f"no rank holds {key} '{name}'" for key, name in self._manifest.tensors.keys() - entries.keys()
        ]
        wrong = sorted(wrong) or tiling_problems(entry for pieces in entries.values() for entry in pieces)
        if len(steps) > 1:
            numbers = ", ".join(sorted(map(str, steps)))
            wrong.append(f"the ranks have records of other numbers of steps: {numbers}")
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise damaged(self.path, f"{wrong[0]}{more}")

    def _parsed(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T:
        return self._parse(*self._read(name), parse)

    def _read(self, name: str) -> tuple[str, dict[str, Any]]:
        path = os.path.join(self._folder, name)
        return path, read_index(self._files, path, self._manifest.files[name]["sha256"])

    @staticmethod
    def _parse(path: str, index: dict[str, Any], parse: Callable[[dict[str, Any]], T]) -> T:
        try:
            return parse(index)
        except ValueError as error:
            raise damaged(path, f"malformed: {error}") from None

    def _fill(self, out: memoryview, key: str, name: str, wanted: list[Range]) -> None:
        """Copy ranges of a tensor into `out`: (first element in the tensor, in `out`, number of elements)."""
        size, filled = ITEM_SIZES[self.dtype(key, name)], 0
        for entry in self._index().get((key, name), []):
            shared = list(_overlaps(entry, wanted))
            raw = self._bytes(entry) if shared else memoryview(b"")
            for target, source, count in shared:
                out[target * size : (target + count) * size] = raw[source * size : (source + count) * size]
                filled += count
        length = sum(count for _, _, count in wanted)
        if filled != length:
            raise damaged(self.path, f"its indexes cover {filled} of {length} elements of '{name}'")

    def _bytes(self, entry: ChunkEntry) -> memoryview:
        path = os.path.join(self._folder, entry.file)
        raw = self._part(path, entry.offset, entry.offset + entry.nbytes)
        if (entry.file, entry.offset) not in self._checked:
            if len(raw) != entry.nbytes or zlib.crc32(raw) != entry.crc32:
                raise damaged(path, f"the checksum of '{entry.name}' ({entry.key}) does not match")
            self._checked.add((entry.file, entry.offset))
        return raw

    def _part(self, path: str, start: int, end: int) -> memoryview:
        try:
            if path not in self._ranges:
                self._ranges[path] = self._files.ranges(path)
            return self._ranges[path](start, end)
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            raise damaged(path, error) from None


def _overlaps(entry: ChunkEntry, wanted: Sequence[Range]) -> Iterator[Range]:
    """Runs that `entry` shares with `wanted`, which is in ascending order: (element in the output, in the
    piece, how many)."""
    position = 0
    for first, source, count in entry.segments():
        position = bisect_right(wanted, first, position, key=_end)
        number = position
        while number < len(wanted) and wanted[number][0] < first + count:
            start, target, length = wanted[number]
            low, high = max(first, start), min(first + count, start + length)
            yield target + low - start, source + low - first, high - low
            number += 1
        if position == len(wanted):
            return


def _end(run: Range) -> int:
    return run[0] + run[2]
