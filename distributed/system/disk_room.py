"""Room in the folder of temporary files, in which a task reaches the ranks and the trained state returns."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed.errors import UserError
from distributed.system.private_files import write_private

__all__ = [
    "RESERVE",
    "free_bytes",
    "lacks_room",
    "needs_room",
    "no_room",
    "readable",
    "reserve",
    "write_with_reserve",
]

RESERVE = ".reserve"
"""Name of the file that `reserve` makes."""

_RESERVED = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes that this user can still write in the file system of `folder`. Raises OSError."""
    return shutil.disk_usage(folder).free


def readable(size: int) -> str:
    """A number of bytes in MB."""
    return f"{size / 1e6:.1f} MB"


def lacks_room(error: BaseException | None) -> bool:
    """Whether `error`, or an error that led to it, is a full file system or quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_room(what: str, folder: str | os.PathLike[str], needed: int | None = None) -> UserError:
    """The error for a folder of temporary files that is too small.

    Args:
        what: clause that names what does not fit.
        needed: its size in bytes, if it is known.
    """
    free = "an unknown number of bytes"
    with suppress(OSError):
        free = readable(free_bytes(folder))
    return UserError(
        f"no space for {what}",
        field="TMPDIR",
        got=f"{free} free in {folder}",
        allowed=f"at least {readable(needed)}" if needed is not None else None,
        remedy="Set the environment variable TMPDIR to a folder with more free space, or delete files there",
    )


@contextmanager
def needs_room(what: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Raise `no_room` instead of the error of a full file system."""
    try:
        yield
    except OSError as error:
        if not lacks_room(error):
            raise
        raise no_room(what, folder) from error


def reserve(folder: str | os.PathLike[str]) -> None:
    """Reserve space in `folder` for `write_with_reserve`, which is then possible on a full disk.

    Raises:
        OSError: there is none.
    """
    descriptor = os.open(Path(folder, RESERVE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _RESERVED)
    finally:
        os.close(descriptor)


def write_with_reserve(path: Path, data: bytes) -> None:
    """As `write_private`; on a full disk, into what `reserve` reserved in the folder of `path`."""
    try:
        write_private(path, data)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        path.with_name(RESERVE).unlink(missing_ok=True)
        write_private(path, data)
