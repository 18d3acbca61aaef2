"""Words of a shell that stay what they are, whatever is in them."""

from __future__ import annotations

import re
import shlex

__all__ = ["quote"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def quote(text: str) -> str:
    """`text` as one word of bash, on one line: sbatch refuses scripts with carriage returns, and reads
    lines that begin with ``#SBATCH``.
    """
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", escaped) + "'"
