"""Redact values: mappings by their keys, command lines by their flags, and all text in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.redaction.names import is_secret_name
from distributed.redaction.text import MARK, NEXT_FLAG, scan

__all__ = ["holds_secret", "is_redacted", "redact", "redact_words"]

_ASSIGNMENT = re.compile(r"(-{0,2}[\w.%\[\]-]+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_USER_FLAGS = {"-u", "--user", "--proxy-user"}
_MARKED = re.compile(r"://\*\*\*@|=\*\*\*(?:[&;,\s]|\Z)|\A\*\*\*(?:@|\Z)")
_NUMBERS = re.compile(r"(?i)pass|pwd|secret")
"""Names whose values are secrets also as whole numbers; a token may be the index of one."""


def redact(value: Any, name: str = "") -> Any:
    """A copy of `value` without secrets. Only text, numbers, mappings and sequences are looked into.

    Args:
        name: name of the value: a field, a key, a variable.
    """
    return _walk(value, name, False)


def redact_words(words: Iterable[str]) -> list[str]:
    """The words of a command line without secrets: ``--password x``, ``--password=x``, ``PGPASSWORD=x``."""
    return _words(list(words), False)


def holds_secret(value: Any, name: str = "") -> bool:
    """Whether `value` certainly holds a secret.

    Values that are looked up (``$NAME``), paths, and user names without a password are none.
    """
    return bool(_walk(value, name, True) != value)


def is_redacted(value: Any) -> bool:
    """Whether `value` holds what `redact` left of a secret, so that it cannot be used."""
    if isinstance(value, str):
        return _MARKED.search(value) is not None
    if isinstance(value, Mapping):
        return any(map(is_redacted, value.values()))
    return isinstance(value, list | tuple) and any(map(is_redacted, value))


def _walk(value: Any, name: str, certain: bool) -> Any:
    if value is None or isinstance(value, bool):
        return value
    is_secret = bool(name) and is_secret_name(name)
    if isinstance(value, str):
        if is_secret and _counts(name, value, certain):
            return MARK
        return scan(value, certain)
    if isinstance(value, int):
        return MARK if is_secret and _NUMBERS.search(name) else value
    if isinstance(value, Mapping):
        return _mapping(value, name if is_secret else "", certain)
    if isinstance(value, list | tuple):
        return _sequence(value, name if is_secret else "", certain)
    if isinstance(value, set | frozenset):
        return type(value)(_walk(item, name if is_secret else "", certain) for item in value)
    return value


def _counts(name: str, value: str, certain: bool) -> bool:
    if not value or (name in ("PWD", "OLDPWD") and value.startswith("/")):
        return False
    return not (certain and value[0] in "/~.$`")


def _mapping(value: Mapping[Any, Any], name: str, certain: bool) -> dict[Any, Any]:
    """A mapping; in ``{"name": "PGPASSWORD", "value": ...}``, as manifests have it, one key names another."""
    named = value.get("name", value.get("key"))
    item = named if isinstance(named, str) and "value" in value else ""
    return {
        key: _walk(inner, name or (item if key == "value" and item else str(key)), certain)
        for key, inner in value.items()
    }


def _sequence(value: list[Any] | tuple[Any, ...], name: str, certain: bool) -> Any:
    if not name and value and all(isinstance(item, str) for item in value):
        items: list[Any] = _words(list(value), certain)
    else:
        items = [_walk(item, name, certain) for item in value]
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _words(words: list[str], certain: bool) -> list[str]:
    found: list[str] = []
    flag = ""
    for word in words:
        previous, flag = flag, ""
        assignment = _ASSIGNMENT.fullmatch(word)
        if previous in _USER_FLAGS and ":" in word:
            found.append(_hidden(word, certain) if not word.replace(":", "").isdigit() else word)
        elif previous and previous not in _USER_FLAGS and not NEXT_FLAG.match(word):
            found.append(_hidden(word, certain))
        elif assignment is not None and is_secret_name(assignment[1]):
            found.append(f"{assignment[1]}={_hidden(assignment[2], certain)}")
        else:
            if _FLAG.fullmatch(word) and (word in _USER_FLAGS or is_secret_name(word)):
                flag = word
            found.append(scan(word, certain))
    return found


def _hidden(value: str, certain: bool) -> str:
    return MARK if _counts("", value, certain) else value
