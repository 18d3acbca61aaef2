"""Files of JSON lines, which are only ever appended to."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from distributed.redaction import redact

__all__ = ["append_line", "read_lines"]


def append_line(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Add one line to the file at `path`, which is made when it is missing, as its folder is.

    The line is one write, so that lines of several processes do not mix. The file is closed after each line,
    because an open file would block unmounting its file system.

    Args:
        values: anything; what JSON lacks is written as text, NaN and infinity as ``"nan"``, ``"inf"``.
            Secrets are left out.

    Raises:
        OSError: it cannot be written, or not all of it.
    """
    line = json.dumps(redact(_plain(values)), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    descriptor = _opened(path)
    try:
        # End a line that a killed process or a full disk left incomplete, so that ours stays readable.
        data = line if _ends_well(descriptor) else b"\n" + line
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def read_lines(path: str | os.PathLike[str], start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset behind it, values) of each complete line from offset `start` on; torn ones are left out."""
    with open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                yield start, values


def _opened(path: str | os.PathLike[str]) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return os.open(path, flags, 0o600)


def _ends_well(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str) else str(value)
