"""The command line: finds the verb, runs it, and turns failures into messages and exit codes.

Exit codes: 0 finished, 1 a failure (`doctor`: an error found), 2 a mistake in the user's input,
75 preempted after saving, 130 interrupted. A user's script keeps its own ``sys.exit`` code.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from distributed._version import __version__
from distributed.commands import VERBS, Subparsers, add_verbs
from distributed.commands.corrections import refuse_unknown
from distributed.commands.parser import PROG, Parser
from distributed.errors import EXIT_MISTAKE, UserError, WorkerError, did_you_mean
from distributed.system.garbage_collection import spare_imports
from distributed.system.output import print_line

__all__ = ["build_parser", "main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and whatever a user's script exits with.
    """
    from distributed.commands.script import script_traceback

    if argv is None:
        spare_imports()
    try:
        return _dispatch(sys.argv[1:] if argv is None else list(argv))
    except UserError as error:
        print_line(f"error: {error}")
        return EXIT_MISTAKE
    except WorkerError as error:
        print_line(error)
        return 1
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    except Exception as error:  # noqa: BLE001 - the last handler of the program: prints all of it
        from distributed.redaction import redact_text

        lines = traceback.format_exception(type(error), error, script_traceback(error.__traceback__))
        print(redact_text("".join(lines)), file=sys.stderr, end="")
        return 1


def build_parser(words: Sequence[str] = ()) -> Parser:
    """The parser for the command line `words`; only the requested verb gets its flags."""
    parser = Parser(
        prog=PROG, description="Same config, same training: on another backend or number of ranks."
    )
    parser.add_argument("--version", action="version", version=f"distributed-trainer {__version__}")
    # Without a metavar, Python 3.11 prints every verb twice.
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", action=Subparsers)
    assert isinstance(subparsers, Subparsers)
    subparsers.asked = asked = _asked(words)
    add_verbs(subparsers, VERBS)
    if asked not in {verb.name for verb in VERBS}:
        _add_plugin_verbs(subparsers)
    return parser


def _dispatch(words: list[str]) -> int:
    own, dashes, rest = _split(_without_local_rank(words))
    parser = build_parser(own)
    _check_verb(parser, _asked(own))
    args, unknown = parser.parse_known_args(own)
    if args.verb is None:
        if unknown:
            refuse_unknown(unknown, parser)
        parser.print_help()
        return 0
    verb = own.index(args.verb)
    args.unknown, args.rest, args.words = unknown, rest, [*own[:verb], *own[verb + 1 :]]
    if (unknown or dashes) and not getattr(args, "passes_arguments_on", False):
        refuse_unknown(unknown or rest or ["--"], args.parser)
    return int(args.run(args) or 0)


def _without_local_rank(words: list[str]) -> list[str]:
    """Drop the argument of the launchers of deepspeed and torch, which repeats LOCAL_RANK."""
    first, rank = words[0] if words else "", os.environ.get("LOCAL_RANK")
    return words[1:] if first in (f"--local_rank={rank}", f"--local-rank={rank}") else words


def _asked(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    """The words before ``--``, whether there is one, and the words after it."""
    if "--" not in words:
        return words, False, []
    where = words.index("--")
    return words[:where], True, words[where + 1 :]


def _check_verb(parser: Parser, asked: str | None) -> None:
    verbs = next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    if asked is not None and asked not in verbs:
        raise UserError(
            f"unknown verb '{asked}'.{did_you_mean(asked, verbs)}",
            allowed=", ".join(sorted(verbs)),
            remedy=f"`{PROG} backends` also lists plugins that could not be loaded",
        )


def _add_plugin_verbs(subparsers: argparse._SubParsersAction[Any]) -> None:
    from distributed.registry.catalog import get_catalog

    get_catalog().add_commands(subparsers)


if __name__ == "__main__":
    sys.exit(main())
