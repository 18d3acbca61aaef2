"""Checks of the flags of ``plan``, made before anything is planned."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from distributed.commands.parser import positive_int
from distributed.errors import UserError

__all__ = ["NUMBER", "check_flags", "number_of", "steps_of"]

NUMBER = "number:"
"""Begins the names of arguments that are numbers of a transformer."""
_STEPS = "10"
_OF_A_PLAN = [
    "output",
    "html",
    "number",
    "verify",
    "rejected",
    "script",
    "hardware",
    "devices",
    "axes",
    "codecs",
]


def check_flags(args: argparse.Namespace) -> None:
    """Check values and combinations of flags, and that files can be written.

    Raises:
        UserError: a flag has a wrong value, no effect, or contradicts another one.
    """
    if args.json and (args.verify or args.history is not None):
        raise UserError(
            "JSON has the plans alone",
            field="--json",
            got="with --verify or --history",
            remedy="Leave --json out",
        )
    _check_history(args)
    _check_number(args)
    _check_verify(args)
    for flag, path in (("--output", args.output), ("--html", args.html)):
        if path is not None:
            _check_file(path, flag)


def number_of(args: argparse.Namespace) -> int:
    """Row of the table that is written or tried; the first by default."""
    return positive_int(args.number or "1", "--number")


def steps_of(args: argparse.Namespace) -> int:
    """Steps of a trial."""
    return positive_int(args.steps or _STEPS, "--steps")


def _check_history(args: argparse.Namespace) -> None:
    """Check that nothing is asked of a plan where none is made."""
    if args.history is None:
        return
    for name in (*_OF_A_PLAN, *(name for name in vars(args) if name.startswith(NUMBER))):
        value = getattr(args, name)
        if value:
            flag = name.removeprefix(NUMBER).replace("_", "-")
            raise UserError(
                "nothing is planned with --history",
                field=f"--{flag}",
                got=None if value is True else value,
                allowed="without --history",
                remedy="Leave one of them out",
            )


def _check_number(args: argparse.Namespace) -> None:
    number, plans = number_of(args), positive_int(args.plans, "--plans")
    if number > plans:
        raise UserError(
            "the table has no row with this number",
            field="--number",
            got=number,
            allowed=f"1 to {plans}",
            remedy="Choose one of these, or list more plans (--plans)",
        )
    if args.number is not None and args.output is None and not args.verify:
        raise UserError(
            "it selects the plan that --output writes or --verify tries, and neither was given",
            field="--number",
            got=number,
            allowed="together with --output or --verify",
            remedy="Add one of these, or leave it out",
        )


def _check_verify(args: argparse.Namespace) -> None:
    layers = args.verify_layers
    given = {"--steps": args.steps, "--verify-layers": layers}
    for flag, value in given.items():
        if value is not None and not args.verify:
            raise UserError(
                "it is an option of --verify, which was not given",
                field=flag,
                got=value,
                allowed="together with --verify",
                remedy="Add --verify, or leave it out",
            )
    if layers is not None:
        positive_int(layers, "--verify-layers")
    if args.verify:
        from distributed.operations.planning.verification import check_steps

        check_steps(steps_of(args))


def _check_file(path: str, flag: str) -> None:
    target = Path(path).absolute()
    if target.is_dir():
        raise UserError("a folder has this name", field=flag, got=path, remedy="Name a file in it")
    if not target.parent.is_dir():
        raise UserError(
            "the folder of the file does not exist",
            field=flag,
            got=path,
            remedy="Create the folder, or choose another one",
        )
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise UserError(
            f"no file can be created in this folder: {error.strerror or error}",
            field=flag,
            got=path,
            remedy="Choose a folder in which you may write",
        ) from None
