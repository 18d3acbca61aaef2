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

import os
import time
from collections.abc import Mapping
from typing import Any

from distributed.system.json_lines import append_line

NAME = "record.jsonl"
VERSION = 1


def append(folder: str | os.PathLike[str], kind: str, values: Mapping[str, Any]) -> None:
    """Add one line to the record in `folder`, which is made when it is missing.

    Args:
        kind: kind from this module's table.
        values: anything, see `append_line`.

    Raises:
        OSError: it cannot be written, or not all of it.
    """
    append_line(os.path.join(folder, NAME), {"kind": kind, "time": round(time.time(), 3), **values})
