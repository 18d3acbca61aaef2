"""The argument parser of all verbs: its errors are UserErrors that name the nearest flag."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from distributed.errors import UserError

__all__ = ["PROG", "Parser", "add_set", "byte_count", "flags_of", "positive_int"]

_BYTES = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)

PROG = "python -m distributed.cli"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError, and never completes an abbreviated flag.

    Parsed arguments have it as ``parser``: that of the innermost action, such as ``bench comm``, whose flags
    an error about unknown ones refers to.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would swallow a script's own flag that happens to be our prefix.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with `message` instead of printing the whole usage."""
        raise UserError(message, remedy=f"`{self.prog} --help` lists the flags")


def add_set(parser: argparse._ActionsContainer, about: str) -> None:
    """Add ``--set NAME=VALUE``, which may be repeated."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=about)


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every long flag that `parser` knows."""
    return [flag for flag in parser._option_string_actions if flag.startswith("--")]


def positive_int(text: str, flag: str) -> int:
    """The number that `text` is, or a UserError that names `flag`."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise UserError("must be a positive integer", field=flag, got=text, allowed="1, 2, 3, ...")
    return int(text)


def byte_count(text: str, flag: str) -> int:
    """The number of bytes that `text` is, such as ``512``, ``64K`` or ``1M``, with 1K = 1024, or a UserError
    that names `flag`."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise UserError("not a number of bytes", field=flag, got=text, allowed="512, 64K, 1M, 2G, ...")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]
