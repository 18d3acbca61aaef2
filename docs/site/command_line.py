"""The page of the command line: every verb and flag, from the real parsers."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from distributed.cli import build_parser
from distributed.commands import VERBS
from distributed.commands.operations import OPERATIONS
from distributed.commands.parser import PROG
from docs.site.markdown import code, table

__all__ = ["command_line_page", "parsers"]

_HEAD = f"""# Command line

`{PROG} VERB ...`, or `distributed VERB ...` where the package is installed. `VERB` is a
subcommand. This page lists every subcommand and flag, written from the parsers by
`python -m docs.site.generate`. `--help` after a subcommand prints the same. `{PROG} --help`
also lists the subcommands of plugins. Exit codes are in [Launching](launching.md#errors-and-exit-codes).

"""
_SHARED = ("configuration", "configuration fields")


def parsers(verb: str) -> Iterator[argparse.ArgumentParser]:
    """The parser of `verb`, then those of its own verbs."""
    top = _choices(build_parser([verb]))[verb]
    yield top
    yield from _choices(top).values()


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: choice for group in groups for name, choice in group.choices.items()}


def command_line_page() -> str:
    """``docs/cli.md``."""
    parts, fields = [_HEAD], ""
    for verb in (*VERBS, *OPERATIONS):
        parts.append(f"## {verb.name}\n\n{verb.summary}\n")
        for number, parser in enumerate(parsers(verb.name)):
            if number:
                parts.append(f"### {parser.prog.removeprefix(PROG).strip()}\n\n{parser.description or ''}\n")
            parts.append(textwrap.fill(" ".join((parser.epilog or "").split()), 120))
            rows, shared = _rows(parser)
            fields = fields or shared
            if shared:
                rows += "\nAnd the [flags of the configuration](#configuration-flags).\n"
            parts.append(rows)
    parts.append(f"## Configuration flags\n\nAccepted by each subcommand that links here.\n\n{fields}")
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part.strip())


def _rows(parser: argparse.ArgumentParser) -> tuple[str, str]:
    """The table of a parser's own arguments, and that of the configuration's."""
    own: list[argparse.Action] = []
    shared: list[argparse.Action] = []
    for group in parser._action_groups:
        (shared if group.title in _SHARED else own).extend(group._group_actions)
    return _table(parser, own), _table(parser, shared)


def _table(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    silent = (argparse._HelpAction, argparse._SubParsersAction)
    rows = [_row(parser, a) for a in actions if not isinstance(a, silent) and a.help != argparse.SUPPRESS]
    return table(rows, "argument", "") if rows else ""


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    formatter = parser.formatter_class(prog=parser.prog)
    names = list(action.option_strings)
    value = "" if action.nargs == 0 else formatter._format_args(action, _metavar(formatter, action))
    shown = [f"{name} {value}".strip() for name in names] if names else [value]
    text = formatter._expand_help(action) if action.help else ""
    return "<br>".join(code(one) for one in shown), text.replace("|", "\\|").replace("<", "&lt;").replace(
        "*", "\\*"
    )


def _metavar(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    optional = bool(action.option_strings)
    default = (
        formatter._get_default_metavar_for_optional
        if optional
        else formatter._get_default_metavar_for_positional
    )
    return default(action)
