"""Read a committed checkpoint: every hash is checked before use, and nothing is unpickled."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from distributed.checkpoint.chunk_index import ITEM_SIZES, ChunkEntry, tiling_problems
from distributed.checkpoint.codec import decode
from distributed.checkpoint.file_names import FORMAT, MANIFEST, VERSION, rank_file
from distributed.checkpoint.filesystem import FileLayer, Ranges, unseal
from distributed.checkpoint.object_store import located
from distributed.errors import UserError
from distributed.interfaces.state import StateReader

__all__ = ["PortableReader", "check_files", "read_index", "read_manifest", "verify"]

_REMEDY = "Resume from an older checkpoint, or restore the file from a copy"


def damaged(path: str, why: object) -> UserError:
    """The error for a file that is not what was written."""
    return UserError(f"the checkpoint is damaged: {path}: {why}", remedy=_REMEDY)


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest of the checkpoint in directory `path`; its hash and all file sizes agree.

    Raises:
        UserError: missing, incomplete, damaged, or of another format or version.
    """
    files, path = located(path)
    return _manifest(files, path)[0]


def _manifest(files: FileLayer, path: str) -> tuple[dict[str, Any], str]:
    """(the manifest, the directory of the files that it names)"""
    file = os.path.join(path, MANIFEST)
    manifest = _read_sealed(files, file)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise UserError(
            f"{file} is not a checkpoint that this version reads",
            got=f"{manifest.get('format')} version {manifest.get('version')}",
            allowed=f"{FORMAT} version {VERSION}",
            remedy="Read it with the version of distributed-trainer that wrote it",
        )
    try:
        folder = os.path.join(path, _bare(manifest["folder"])) if "folder" in manifest else path
        check_files(files, folder, manifest["files"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(file, f"malformed: {error!r}") from None
    return manifest, folder


def check_files(files: FileLayer, directory: str, facts: Mapping[str, dict[str, Any]]) -> None:
    """See that every file is there with its size.

    Raises:
        UserError: one is not.
        ValueError: a name leads out of the directory.
    """
    names = {name: os.path.join(directory, _bare(name)) for name in facts}
    try:
        sizes = files.sizes(directory)
    except ConnectionError:
        raise
    except OSError as error:
        raise damaged(directory, error.strerror) from None
    for name, path in names.items():
        size = facts[name]["size"]
        if name not in sizes:
            raise damaged(path, "it is missing")
        if sizes[name] != size:
            raise damaged(path, f"it has {sizes[name]} bytes, and had {size} when it was written")


def read_index(files: FileLayer, path: str, sha256: str) -> dict[str, Any]:
    """A rank's index file, whose hash is known from the manifest.

    Raises:
        UserError: missing, damaged, or another checkpoint's.
    """
    index = _read_sealed(files, path)
    if files.sha256(path) != sha256:
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
        files, path = located(path)
        manifest, folder = _manifest(files, path)
    except UserError as error:
        return [str(error)]
    problems = []
    for name, facts in sorted(manifest["files"].items())[part::parts]:
        problems += _digest_problems(files, os.path.join(folder, name), facts)
    try:
        reader = PortableReader(path)
        entries = reader.entries()
    except UserError as error:
        return [*problems, str(error)]
    absent = reader.tensors().keys() - {(entry.key, entry.name) for entry in entries}
    problems += [f"{path}: no rank holds {key} '{name}'" for key, name in sorted(absent)]
    return problems + tiling_problems(entries)


def _digest_problems(files: FileLayer, path: str, facts: dict[str, Any]) -> list[str]:
    try:
        if "crc32" in facts:
            wrong = files.crc32(path) != facts["crc32"]
        else:
            wrong = files.sha256(path) != facts["sha256"]
    except ConnectionError:
        raise
    except (OSError, KeyError) as error:
        return [f"{path}: {error}"]
    return [f"{path}: its checksum does not match its content"] if wrong else []


def _read_sealed(files: FileLayer, path: str) -> dict[str, Any]:
    try:
        return unseal(files.read(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no complete checkpoint: {path} is missing", remedy=_REMEDY) from None
    except ConnectionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None


def _bare(name: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


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
        self._manifest, self._folder = _manifest(self._files, self.path)
        try:
            self._take(self._manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(os.path.join(self.path, MANIFEST), f"malformed: {error!r}") from None
        self._entries: dict[tuple[str, str], list[ChunkEntry]] | None = None
        self._ranges: dict[str, Ranges] = {}
        self._checked: set[tuple[str, int]] = set()

    def _take(self, manifest: dict[str, Any]) -> None:
        self.step, self.world_size = int(manifest["step"]), int(manifest["world_size"])
        self.versions: dict[str, str] = manifest["versions"]
        self.extra: dict[str, Any] = {key: decode(value) for key, value in manifest["extra"].items()}
        self.omitted = self.extra.get("omitted", {})
        self.groups = decode(manifest["groups"])
        self.scalars = decode(manifest["scalars"])
        self.aliases = manifest["aliases"]
        self.scaler = decode(manifest["scaler"])
        self._tensors = {(t["key"], t["name"]): (tuple(t["shape"]), t["dtype"]) for t in manifest["tensors"]}
        if not all(dtype in ITEM_SIZES for _, dtype in self._tensors.values()):
            raise ValueError("unknown dtype")

    def tensors(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """``(key, name) -> shape`` of every tensor in the saved state."""
        return {tensor: shape for tensor, (shape, _) in self._tensors.items()}

    def dtype(self, key: str, name: str) -> str:
        """Torch's name of a tensor's dtype, e.g. ``bfloat16``. Raises KeyError."""
        return str(self._tensors[key, name][1])

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Any:
        """Elements ``start .. start + length`` of the flattened tensor, as a CPU torch tensor.

        Only the pieces that overlap the range are touched; each is checked once.

        Raises:
            KeyError: no such tensor.
            ValueError: the range reaches beyond the tensor.
            UserError: the stored bytes are damaged (checksum); names the file.
        """
        import torch

        shape, dtype = self._tensors[key, name]
        length = prod(shape) - start if length is None else length
        if start < 0 or length < 0 or start + length > prod(shape):
            raise ValueError(f"elements {start} to {start + length} are not in '{name}' of shape {shape}")
        out = torch.empty(length, dtype=getattr(torch, dtype))
        if length:
            self._fill(out.view(torch.uint8).numpy().data, key, name, start, length)
        return out

    def rank_extra(self, rank: int) -> dict[str, Any] | None:
        """What rank `rank` saved for itself, None when there was no such rank.

        Raises:
            UserError: its index file is damaged.
        """
        if rank >= self.world_size:
            return None
        extra: dict[str, Any] = self._parsed(rank_file(rank), lambda index: decode(index["rank_extra"]))
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
        return sum(facts["size"] for facts in self._manifest["files"].values())

    @property
    def saved_at(self) -> float:
        """When it was committed, in seconds since the epoch. Raises OSError."""
        return self._files.modified(os.path.join(self.path, MANIFEST))

    def close(self) -> None:
        """Release the mapped files. Reading again maps them again."""
        self._ranges.clear()

    def _index(self) -> dict[tuple[str, str], list[ChunkEntry]]:
        if self._entries is None:
            entries: dict[tuple[str, str], list[ChunkEntry]] = {}
            for name in self._manifest["indexes"]:
                for entry in self._parsed(name, self._checked_entries):
                    entries.setdefault((entry.key, entry.name), []).append(entry)
            self._entries = entries
        return self._entries

    def _parsed(self, name: str, parse: Callable[[dict[str, Any]], Any]) -> Any:
        path = os.path.join(self._folder, name)
        try:
            return parse(read_index(self._files, path, self._manifest["files"][_bare(name)]["sha256"]))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"malformed: {error!r}") from None

    def _checked_entries(self, index: dict[str, Any]) -> list[ChunkEntry]:
        entries = [ChunkEntry.from_json(data) for data in index["chunks"]]
        for entry in entries:
            if (entry.shape, entry.dtype) != self._tensors.get((entry.key, entry.name)):
                raise ValueError(f"'{entry.name}' is not the tensor that the manifest describes")
            if entry.offset + entry.nbytes > self._manifest["files"][entry.file]["size"]:
                raise ValueError(f"a chunk of '{entry.name}' reaches beyond {entry.file}")
        return entries

    def _fill(self, out: memoryview, key: str, name: str, start: int, length: int) -> None:
        size, filled = ITEM_SIZES[self.dtype(key, name)], 0
        for entry in self._index().get((key, name), []):
            runs = list(_overlaps(entry, start, length))
            raw = self._bytes(entry) if runs else memoryview(b"")
            for target, source, count in runs:
                out[target * size : (target + count) * size] = raw[source * size : (source + count) * size]
                filled += count
        if filled != length:
            raise damaged(self.path, f"its indexes cover {filled} of {length} elements of '{name}'")

    def _bytes(self, entry: ChunkEntry) -> memoryview:
        path = os.path.join(self._folder, _bare(entry.file))
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


def _overlaps(entry: ChunkEntry, start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Runs that `entry` and the range share: (element in the range, in the piece, how many)."""
    for first, source, count in entry.segments():
        if first >= start + length:
            return
        low, high = max(first, start), min(first + count, start + length)
        if low < high:
            yield low - start, source + low - first, high - low
