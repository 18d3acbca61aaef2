"""Every change a checkpointer makes to the file system, and JSON that knows its own hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from typing import Any, BinaryIO

__all__ = ["FileLayer", "crc32_of", "seal", "sha256_of", "unseal"]

_SEAL = b'{"sha256":"'
_BLOCK = 1 << 20


class FileLayer:
    """The operations that write. Reading needs no layer: it changes nothing.

    Every method raises OSError. Directories are made with mode 0700, files with 0600.
    """

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
        """Return when what was written is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def fsync_directory(self, path: str) -> None:
        """Return when the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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


def seal(content: dict[str, Any]) -> bytes:
    """`content` as JSON whose first entry is the SHA-256 of all the bytes behind it."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")[1:]
    return _SEAL + hashlib.sha256(body).hexdigest().encode("ascii") + b'",' + body


def unseal(raw: bytes) -> dict[str, Any]:
    """The content of sealed JSON.

    Raises:
        ValueError: one byte differs from what was sealed.
    """
    start = len(_SEAL) + 64
    body = raw[start + 2 :]
    digest = hashlib.sha256(body).hexdigest().encode("ascii")
    if raw[: start + 2] != _SEAL + digest + b'",':
        raise ValueError("its hash does not match its content")
    content: dict[str, Any] = json.loads(b"{" + body)
    return content


def sha256_of(path: str) -> str:
    """Hexadecimal SHA-256 of a file. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32_of(path: str) -> int:
    """CRC-32 of a file. Raises OSError."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
