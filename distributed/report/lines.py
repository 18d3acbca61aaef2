"""The record of a run: ``record.jsonl``, one JSON object a line, only ever appended to.

| kind | written by | when |
|---|---|---|
| ``start`` | rank 0 | ranks are up: configuration, place, versions, where the training goes on |
| ``log``, ``epoch``, ``checkpoint`` | rank 0 | a log step, the end of an epoch, a committed checkpoint |
| ``finish`` | rank 0 | the ranks are done: status |
| ``restart`` | who started the ranks | a failure, and the ranks start again |
| ``end`` | who called `fit` | status, totals, and the error if there was one |

Each line is one write, so that lines of several processes do not mix; a process that is killed leaves a torn
last line at worst. ``run`` names a `fit`, ``attempt`` one start of its ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["NAME", "VERSION", "append", "without_passwords"]

NAME = "record.jsonl"
VERSION = 1
_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^/@\s]+@")


def append(folder: str | os.PathLike[str], kind: str, values: Mapping[str, Any]) -> None:
    """Add one line to the record in `folder`, which is made when missing.

    Args:
        folder: of this host.
        kind: as in this module's table.
        values: anything; what JSON lacks is written as text, NaN and infinity as ``"nan"``, ``"inf"``.

    Raises:
        OSError: it cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    line = json.dumps(
        _plain({"kind": kind, "time": round(time.time(), 3), **values}),
        separators=(",", ":"),
        allow_nan=False,
    )
    descriptor = os.open(place / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # What a killed process tore ends here, and takes none of ours with it.
        begin = b"" if _ends_well(place / NAME) else b"\n"
        os.write(descriptor, begin + line.encode() + b"\n")
    finally:
        os.close(descriptor)


def without_passwords(text: str) -> str:
    """`text`, user names and passwords in its URLs left out."""
    return _PASSWORD.sub(r"\1***@", text)


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return without_passwords(value if isinstance(value, str) else str(value))
