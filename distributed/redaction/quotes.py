"""Where quoted text ends."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["find_closing"]

_MOST = 15
"""Backslashes before a quote: JSON in JSON in JSON in JSON."""


def find_closing(text: str, start: int, quote: str) -> int:
    """The position of the quote that closes the one before `start`, -1 without one on the same line.

    Args:
        quote: opening quote with the backslashes before it, which the closing one has, too.
    """
    if len(quote) > _MOST + 1:
        return -1
    found = _closing(quote).search(text, start)
    return found.start(1) if found is not None and found[1] else -1


@lru_cache(64)
def _closing(quote: str) -> re.Pattern[str]:
    # More backslashes than the opening quote has: a quote inside. Without any, pairs are backslashes.
    backslashes = r"\\" * (len(quote) - 1) if len(quote) > 1 else ""
    pairs = "" if backslashes else r"(?:\\\\)*"
    return re.compile(rf"(?<!\\){pairs}({backslashes}{quote[-1]})|\n")
