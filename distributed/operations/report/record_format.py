"""The record of a run: ``record.jsonl``, one JSON object a line, only ever appended to.

| kind | written by | when |
|---|---|---|
| ``start`` | rank 0 | ranks are up: configuration, place, versions, step from which the training resumes |
| ``log``, ``epoch``, ``checkpoint`` | rank 0 | a log step, the end of an epoch, a committed checkpoint |
| ``finish`` | rank 0 | the ranks are done: status |
| ``restart`` | launcher of the ranks | a failure after which the ranks restart |
| ``end`` | caller of `fit` | status, totals, and the error if there was one |

Each line is one write, so that lines of several processes do not mix; a process that is killed leaves a torn
last line at worst. ``run`` names a `fit`, ``attempt`` one start of its ranks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from distributed.redaction import redact

NAME = "record.jsonl"
VERSION = 1


def append(folder: str | os.PathLike[str], kind: str, values: Mapping[str, Any]) -> None:
    """Add one line to the record in `folder`, which is made when it is missing.

    The file is closed after each line, because an open file would block unmounting its file system.

    Args:
        kind: kind from this module's table.
        values: anything; what JSON lacks is written as text, NaN and infinity as ``"nan"``, ``"inf"``.
            Secrets are left out.

    Raises:
        OSError: it cannot be written, or not all of it.
    """
    plain = redact(_plain({"kind": kind, "time": round(time.time(), 3), **values}))
    line = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    descriptor = _opened(folder)
    try:
        # End a line that a killed process or a full disk left incomplete, so that ours stays readable.
        data = line if _ends_well(descriptor) else b"\n" + line
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _opened(folder: str | os.PathLike[str]) -> int:
    path, flags = os.path.join(folder, NAME), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
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
