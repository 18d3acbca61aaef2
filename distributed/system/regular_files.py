"""Read files of unknown origin: regular files only, and no more of them than a limit."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

__all__ = ["open_regular", "read_limited"]

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading. A named pipe without a writer does not block, and a device is not
    read.

    Args:
        follow_links: whether `path` may be a symbolic link to the file.

    Raises:
        OSError: it cannot be opened, or is not a regular file; ``strerror`` names what it is.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(errno.ELOOP, "it is a symbolic link, not a regular file", str(path)) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a socket, not a regular file", str(path)) from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, "it is a directory, not a file", str(path))
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'special')}, not a regular file", str(path))


def read_limited(path: str | os.PathLike[str], limit: int, *, follow_links: bool = True) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: as `open_regular`, or the file is larger; nothing is read then.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= limit else b""  # a larger number would be allocated
    if size > limit or len(data) > limit:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {limit:,} are read", str(path))
    return data
