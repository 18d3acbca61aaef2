"""Corrected command lines, for the errors about arguments that a verb does not know."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from math import inf
from typing import NamedTuple, NoReturn

from distributed.commands.parser import flags_of
from distributed.errors import UserError

__all__ = ["move_behind", "refuse_unknown", "script_words"]

_NEAR = 0.75
"""Lowest similarity of a misspelled flag, by difflib; two flags of different words reach about 0.6."""


class _Group(NamedTuple):
    """A flag with its values, or a word that stands alone.

    Attributes:
        words: as typed.
        action: the parser's argument; None for one that it does not know.
    """

    words: list[str]
    action: argparse.Action | None


def script_words(args: argparse.Namespace) -> list[str]:
    """The words after ``--``, which go to the script.

    Raises:
        UserError: there is an unknown argument before; has the corrected command line.
    """
    if not args.unknown:
        return list(args.rest)
    unknown = [group.words for group in _groups(args) if group.action is None]
    guess = next(filter(None, (_guess(words, args.parser) for words in unknown)), "")
    behind = move_behind(args, lambda action: action is None)
    if not guess:
        raise UserError(
            f"unknown argument{_s(args.unknown)} {' '.join(args.unknown)}",
            remedy=f"Pass arguments of the script after `--`: `{behind}`",
        )
    raise UserError(
        f"unknown argument{_s(args.unknown)} {' '.join(args.unknown)}.{guess}",
        remedy=f"Corrected: `{_correct(args)}`. Pass arguments of the script after `--`: `{behind}`",
    )


def move_behind(args: argparse.Namespace, moves: Callable[[argparse.Action | None], bool]) -> str:
    """The command line in which the arguments that `moves` selects follow ``--``."""
    kept: list[str] = []
    moved: list[str] = []
    for words, action in _groups(args):
        (moved if moves(action) else kept).extend(words)
    return _line(args, kept, moved)


def _corrected(words: list[str], parser: argparse.ArgumentParser) -> list[str] | None:
    """What an unknown flag with its values `words` most likely means to `parser`, None without a guess; empty
    for one that has no equivalent."""
    flag, equals, value = words[0].partition("=")
    flags = flags_of(parser)
    if flag.endswith(".py") and "--script" in flags:
        return ["--script", *words]
    if not flag.startswith("--"):
        return None
    if _advice(flag):
        return []
    values = [value] if equals else words[1:]
    meant = _meant(flag, values, flags)
    if meant is not None:
        return meant
    similarity, nearest = max((SequenceMatcher(None, flag, other).ratio(), other) for other in flags)
    return [f"{nearest}{equals}{value}", *words[1:]] if similarity > _NEAR else None


def refuse_unknown(words: Iterable[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Raise the UserError about unknown arguments of a verb without a script."""
    unknown = list(words)
    raise UserError(
        f"unknown argument{_s(unknown)} {' '.join(unknown)}.{_guess(unknown, parser)}",
        remedy=f"`{parser.prog} --help` lists the flags",
    )


def _s(words: list[str]) -> str:
    return "s" if len(words) > 1 else ""


def _guess(words: list[str], parser: argparse.ArgumentParser) -> str:
    near = _corrected(words, parser)
    if near is None:
        return ""
    if not near:
        return f" {_advice(words[0].partition('=')[0])}."
    shown = near[0].partition("=")[0] if near[1:] == words[1:] else " ".join(near)
    return f" Did you mean '{shown}'?"


def _advice(flag: str) -> str:
    from distributed.config.aliases import instead_of

    return instead_of(flag.removeprefix("--"))


def _meant(flag: str, values: list[str], flags: list[str]) -> list[str] | None:
    """The flag, or the ``--set``, of the field that `flag` is called after elsewhere."""
    if "--set" not in flags:
        return None
    from distributed.config.aliases import meant_fields
    from distributed.config.load import all_fields

    meant = meant_fields(flag.removeprefix("--"), all_fields())
    if not meant:
        return None
    field, equals, fixed = meant[0].partition("=")
    values = [fixed] if equals else values
    own = f"--{field.replace('_', '-')}"
    return [own, *values] if own in flags else ["--set", f"{field}={values[0] if values else 'true'}"]


def _groups(args: argparse.Namespace) -> list[_Group]:
    """The words before ``--`` in the verb's parts; an unknown flag takes the words up to the next flag."""
    groups: list[_Group] = []
    takes: float = 0
    for word in args.words:
        if word.startswith("-") and len(word) > 1:
            action = args.parser._option_string_actions.get(word.partition("=")[0])
            groups.append(_Group([word], action))
            takes = inf if action is None else 0 if action.nargs == 0 or "=" in word else 1
        elif takes:
            groups[-1].words.append(word)
            takes -= 1
        else:
            groups.append(_Group([word], None))
    return groups


def _correct(args: argparse.Namespace) -> str:
    """The command line with every unknown argument corrected, or after ``--`` where there is no guess."""
    kept: list[str] = []
    moved: list[str] = []
    for words, action in _groups(args):
        better = words if action is not None else _corrected(words, args.parser)
        kept += better or []
        moved += words if better is None else []
    return _line(args, kept, moved)


def _line(args: argparse.Namespace, kept: list[str], moved: list[str]) -> str:
    behind = [*moved, *args.rest]
    return shlex.join([*args.parser.prog.split(), *kept, *(["--", *behind] if behind else [])])
