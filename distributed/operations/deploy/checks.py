"""Checks of names, times, amounts and environment variables for clusters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distributed.redaction import holds_secret, is_secret_name

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the shell looks up when it runs.
_LOOKED_UP = re.compile(r"\$(\w+|\{\w+\}|\([^()]*(\([^()]*\)[^()]*)*\))|`[^`]*`")
# A value that is written there: neither looked up, nor a path.
_WRITTEN = r"[\"']*[^\s\"';&|$`/~.]"
_ASSIGNED = re.compile(rf"(?<![\w-])([A-Za-z_]\w*)=(?:{_WRITTEN}|\$\{{\w+:?-\w)")
_TOLD = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w-]*)[= ]+{_WRITTEN}")
_BEARER = re.compile(rf"\bBearer +{_WRITTEN}", re.IGNORECASE)
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def env_mapping(value: Any) -> Any:
    """``["A=1"]``, as flags give it, as ``{"A": "1"}``; a mapping stays.

    Raises:
        ValueError: an item without ``=``.
    """
    if not isinstance(value, list | tuple):
        return value
    found = {}
    for item in value:
        name, equals, text = str(item).partition("=")
        if not equals:
            raise ValueError(f"'{item}' has no '=': give NAME=VALUE")
        found[name] = text
    return found


def check_env(env: Mapping[str, str], remedy: str) -> None:
    """Refuse invalid variable names, text that no file can hold, and plain-text secrets.

    Raises:
        ValueError: with `remedy` when a name or value looks like a secret.
    """
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                f"'{name}' is not a valid variable name: use letters, digits and _, not starting with a digit"
            )
        check_text(value, name)
        # The value of a variable whose name is a secret's is one, whatever it looks like.
        if is_secret_name(name) or holds_secret(value):
            raise ValueError(
                f"{name} looks like a secret, and the files would hold it in plain text. {remedy}"
            )


def check_line(line: str, what: str, remedy: str) -> None:
    """Refuse a line of shell that no file can hold, or should not: secrets in clear. What the shell finds
    when it runs (``$NAME``, ``$(...)``) is none.

    Raises:
        ValueError: with `remedy` when an address or an assignment in it looks like a secret.
    """
    check_text(line, what)
    named = any(map(is_secret_name, [*_ASSIGNED.findall(line), *_TOLD.findall(line)]))
    if named or _BEARER.search(line) or holds_secret(_LOOKED_UP.sub("", line)):
        # The line itself stays out of the message, which may end in a log.
        raise ValueError(
            f"{what} contains a line with a secret, and the files would hold it in plain text. {remedy}, and"
            " write $NAME in the line"
        )


def check_text(text: str, what: str) -> None:
    """Refuse what no argument, variable or text file can hold.

    Raises:
        ValueError: a NUL, or half a character.
    """
    if "\0" in text:
        raise ValueError(f"{what} holds a NUL character, which no program accepts")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid Unicode") from None


def parse_slurm_time(text: str) -> int:
    """Seconds of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        ValueError: it is none of these, or zero.
    """
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a time limit: give minutes, H:M:S or DAYS-H:M:S")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if seconds <= 0:
        raise ValueError(f"'{text}' is zero: give a time limit of at least one minute")
    return seconds


def parse_bytes(text: str, units: Mapping[str, int]) -> int:
    """Bytes of an amount such as ``16G``, by the factors in `units`.

    Raises:
        ValueError: no number, an unknown unit, or nothing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    if match is None or match[2] not in units:
        known = ", ".join(unit or "none" for unit in units)
        raise ValueError(f"'{text}' is not an amount of memory: give a number and a unit ({known})")
    amount = int(float(match[1]) * units[match[2]])
    if amount <= 0:
        raise ValueError(f"'{text}' is zero: give a positive amount of memory")
    return amount
