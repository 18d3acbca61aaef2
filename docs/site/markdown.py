"""Markdown that reads alike on the repository's web page and on the site."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["code", "table"]


def code(text: str) -> str:
    """`text` as code, safe in a table's cell."""
    if "|" in text or "`" in text:
        return f"<code>{html.escape(text, quote=False).replace('|', '&#124;').replace('*', '&#42;')}</code>"
    return f"`{text}`"


def table(rows: Iterable[Sequence[str]], *head: str) -> str:
    """A table; `rows` are cells of Markdown."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
