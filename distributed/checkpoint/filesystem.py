"""Everything a checkpointer asks of a file system, and JSON that knows its own hash."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from typing import Any, BinaryIO, ClassVar

from distributed.errors import UserError
from distributed.system.regular_files import open_regular
from distributed.system.strict_json import MAX_VALUES, count_marks, parse_json

LARGEST_JSON = 1 << 30
"""Bytes of a manifest, index or mark at most."""

_SEAL = b'{"sha256":"'
_BLOCK = 1 << 20
_REFUSALS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a file system answers that has no fsync. A disk that fails answers EIO."""


Ranges = Callable[[int, int], memoryview]
"""``(first byte, end) -> bytes`` of one file; shorter where the file is."""


class FileLayer:
    """A file system that renames: a disk of this host, or one that several hosts mount.

    Every method raises OSError. Directories are made with mode 0700, files with 0600.

    Attributes:
        look: seconds between checks for files of other hosts, for which there are no events.
        unsynced: whether something was written that the file system does not bring to the disk on
            request, as some network and user-space file systems do not.
    """

    look: ClassVar[float] = 0.01
    unsynced = False

    # -- what writes -------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        """Make one new directory; its parent exists, it does not."""
        os.mkdir(path, 0o700)

    def make_directories(self, path: str) -> None:
        """Make a directory and its parents where they are missing."""
        os.makedirs(path, mode=0o700, exist_ok=True)

    def open(self, path: str) -> BinaryIO:
        """Make a new file for writing; it does not exist yet."""
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        file.write(data)

    def fsync(self, file: BinaryIO) -> None:
        """Return when what was written is on the disk, if the file system can tell: see `unsynced`."""
        file.flush()
        self._sync(file.fileno())

    def fsync_directory(self, path: str) -> None:
        """Return when the names in a directory are on the disk, if the file system can tell."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._sync(descriptor)
        finally:
            os.close(descriptor)

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self.unsynced = True

    def rename(self, source: str, target: str) -> None:
        """Rename atomically within one file system; a file takes the place of an old one."""
        os.rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file, or a directory and what is in it."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def write_file(self, path: str, data: bytes) -> None:
        """A new file with `data`, on the disk on return."""
        with self.open(path) as file:
            self.write(file, data)
            self.fsync(file)

    def publish(self, path: str, data: bytes, staging: str) -> None:
        """A file with `data` that appears whole or not at all, in the place of an old one.

        Args:
            staging: a name in the same file system that is free until then.
        """
        self.write_file(staging, data)
        self.rename(staging, path)

    def create(self, path: str, data: bytes, staging: str) -> None:
        """A file with `data` that appears whole, only where there is none.

        Args:
            staging: a name in the same file system that is free until then.

        Raises:
            FileExistsError: there is one.
        """
        self.write_file(staging, data)
        try:
            os.link(staging, path)
        except FileExistsError:
            raise
        except OSError:
            self.write_file(path, data)  # no hard links there; the name is exclusive all the same
        finally:
            with suppress(FileNotFoundError):
                os.unlink(staging)

    def touch(self, path: str, data: bytes) -> None:
        """Show that the writer of a file is alive: changes what `modified` returns.

        Args:
            data: content for a store that cannot change the time alone.

        Raises:
            FileNotFoundError: the file is gone.
        """
        os.utime(path)

    # -- what reads --------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory."""
        return os.path.exists(path)

    def present(self, directory: str, names: Iterable[str]) -> list[str]:
        """Those of `names` that the directory holds."""
        return [name for name in names if os.path.exists(os.path.join(directory, name))]

    def names(self, directory: str) -> list[str]:
        """What a directory holds; nothing when there is none."""
        try:
            return os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, directory: str) -> dict[str, int]:
        """Bytes of each regular file in a directory; links are left out."""
        with os.scandir(directory) as entries:
            regular = (entry for entry in entries if entry.is_file(follow_symlinks=False))
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in regular}

    def modified(self, path: str) -> float:
        """When a file was last written, in seconds since the epoch."""
        return os.stat(path).st_mtime

    def read(self, path: str) -> bytes:
        """A whole file of sealed JSON, of at most `LARGEST_JSON` bytes."""
        data = bytearray()
        for block in self.blocks(path):
            # JSON has none, and the unwritten parts of a sparse file have nothing else.
            if 0 in block:
                raise OSError(errno.EINVAL, "it is not text: it contains zero bytes", path)
            data += block
            check_json_size(path, len(data))
        return bytes(data)

    def blocks(self, path: str) -> Iterator[bytes]:
        """A whole file, piece by piece."""
        with open_regular(path, follow_links=False) as file:
            while block := file.read(_BLOCK):
                yield block

    def ranges(self, path: str) -> Ranges:
        """What reads parts of a file, for as long as it is kept."""
        with open_regular(path, follow_links=False) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return lambda start, end: memoryview(b"")
            mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
        return lambda start, end: memoryview(mapped)[start:end]

    def sha256(self, path: str) -> str:
        """Hexadecimal SHA-256 of a file."""
        digest = hashlib.sha256()
        for block in self.blocks(path):
            digest.update(block)
        return digest.hexdigest()

    def crc32(self, path: str) -> int:
        """CRC-32 of a file."""
        crc = 0
        for block in self.blocks(path):
            crc = zlib.crc32(block, crc)
        return crc


def check_json_size(path: str, size: int) -> None:
    """Raise an OSError when a file of sealed JSON has more than `LARGEST_JSON` bytes."""
    if size > LARGEST_JSON:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST_JSON:,} bytes", path)


def seal(content: dict[str, Any]) -> bytes:
    """`content` as JSON whose first entry is the SHA-256 of all the bytes behind it.

    Raises:
        UserError: it is larger than what is read back.
    """
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")[1:]
    if len(body) > LARGEST_JSON - 100 or count_marks(body) > MAX_VALUES:
        raise UserError(
            "the state besides tensors of the model and the optimizer is too large for a checkpoint",
            got=f"{len(body):,} bytes with {count_marks(body):,} separators of values",
            allowed=f"{LARGEST_JSON:,} bytes with {MAX_VALUES:,}",
            remedy="Keep long lists in states of callbacks, schedulers and datasets as tensors or arrays",
        )
    return _SEAL + hashlib.sha256(body).hexdigest().encode("ascii") + b'",' + body


def unseal(raw: bytes) -> dict[str, Any]:
    """The content of sealed JSON.

    Raises:
        ValueError: one byte differs from what was sealed, or what was sealed is not what `seal` writes.
    """
    start = len(_SEAL) + 64
    body = raw[start + 2 :]
    digest = hashlib.sha256(body).hexdigest().encode("ascii")
    if raw[: start + 2] != _SEAL + digest + b'",':
        raise ValueError("its hash does not match its content")
    content: dict[str, Any] = parse_json(b"{" + body)
    return content
