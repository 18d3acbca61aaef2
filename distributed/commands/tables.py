"""Tables and JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

# Into a pipe or file there is no terminal to measure; wide lines keep a row on one line for grep.
_PIPE_WIDTH = 240


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print `rows` under `columns`; the first column is never wrapped.

    Args:
        styles: a rich style per row, empty for none.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # Markup would swallow the brackets of `pip install 'distributed-trainer[torch]'`.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(markup=False, highlight=False, emoji=False, width=width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    for row, style in zip_longest(rows, styles, fillvalue=""):
        table.add_row(*row, style=str(style))
    console.print(table)


def print_json(value: Any) -> None:
    """Print `value` as indented JSON."""
    print(json.dumps(value, indent=2))
