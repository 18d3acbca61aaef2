"""The argument parser of all verbs: its errors are UserErrors that name the nearest flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, NoReturn

from distributed.errors import UserError

__all__ = ["PROG", "Parser", "add_set", "flags_of", "nearly", "own_words", "positive_int", "refuse_unknown"]

PROG = "python -m distributed.cli"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError, and never completes an abbreviated flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would swallow a script's own flag that happens to be our prefix.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with `message` instead of printing the whole usage."""
        raise UserError(message, remedy=f"`{self.prog} --help` lists the flags")


def add_set(parser: argparse._ActionsContainer, about: str) -> None:
    """Add ``--set NAME=VALUE``, which may be repeated."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=about)


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every long flag that `parser` knows."""
    return [flag for flag in parser._option_string_actions if flag.startswith("--")]


def nearly(word: str, flags: Iterable[str], above: float = 0.8) -> str | None:
    """The flag that `word` most likely misspells (difflib's ratio `above` that), or None."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return None
    similarity, flag = max((SequenceMatcher(None, name, flag).ratio(), flag) for flag in flags)
    return flag if similarity > above else None


def own_words(args: argparse.Namespace, accepts: bool = True) -> list[str]:
    """The arguments that go to the script; with `accepts` also unknown ones that resemble no flag.

    Raises:
        UserError: another unknown argument.
    """
    for word in args.unknown:
        flag = nearly(word, flags_of(args.parser))
        if flag is not None or not accepts:
            raise UserError(
                f"unknown argument {word}. Did you mean '{flag}'?" if flag else f"unknown argument {word}.",
                remedy=f"If it is the script's own, give it after `--`: -- {word}",
            )
    return [*args.unknown, *args.rest]


def positive_int(text: str, flag: str) -> int:
    """The number that `text` is, or a UserError that names `flag`."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise UserError("must be a positive integer", field=flag, got=text, allowed="1, 2, 3, ...")
    return int(text)


def refuse_unknown(words: Iterable[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Raise the UserError about unknown arguments."""
    unknown = list(words)
    flag = nearly(unknown[0], flags_of(parser), above=0.65)
    guess = f" Did you mean '{flag}'?" if flag else ""
    raise UserError(
        f"unknown argument{'s' if len(unknown) > 1 else ''} {' '.join(unknown)}.{guess}",
        remedy=f"`{parser.prog} --help` lists the flags",
    )
