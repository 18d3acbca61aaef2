"""Redact secrets in text of any kind: messages, command lines, YAML, JSON, tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from distributed.redaction.addresses import find_userinfo, find_without_scheme
from distributed.redaction.names import is_secret_name
from distributed.redaction.quotes import find_closing

__all__ = ["MARK", "NEXT_FLAG", "redact_text", "scan"]

MARK = "***"
"""What stands where a secret was."""

_MAY_HOLD = re.compile(r"(?i)[=:@_-]|AKIA|ASIA|AIza|eyJ|bearer|login")
_PEM = "-----BEGIN "
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:hf|gh[oprsu])_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{16,}|dop_v1_[0-9a-f]{16,}|xox[abeoprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|[sr]k_(?:live|test)_\w{16,}"
    r"|sk-(?=[\w-]{0,40}\d)[\w-]{20,}|eyJ[\w-]{8,400}\.[\w-]{4,}(?:\.[\w-]*)?)"
)
_SPOKEN = re.compile(
    r"(?i:\bbearer)[ \t]+(?!(?:tokens?|auth\w*|scheme|header)\b)(?P<token>[^\s\"'`,;)]{6,})"
    r"|\blogin[ \t]+(?P<login>[0-9a-f]{32,})"
    r"|(?<!\S)(?:-u|--(?:proxy-)?user)[ \t=]+[\"']?(?P<user>(?!\d+:\d+(?:\s|\Z))[^\s:\"']+:[^\s\"']+)"
)
# A name and what comes between it and its value. The name begins where no character of a name precedes it,
# so that each is read once.
_NAMED = re.compile(
    r"(?<![\w.%\-\[\]])(?P<name>[\w.%\[\]-]+)"
    r"(?:(?P<close>\\*[\"']?)\]?(?P<pad>[ \t]{0,8})(?P<sign>=>|[=:])(?P<gap>[ \t]{0,8})|(?P<flag>[ \t]{1,8}))"
)
_OPENING = re.compile(r"[bBfFrRuU]{0,2}(?P<quote>\\*[\"'`])")
_PLAIN_END = re.compile(r"\s|[&;,](?=[\w.%\[\]-]+=)|[\"'`](?=[\s,;:.)\]}>]|\Z)")
_CLOSING = ",;.)]}>\\"
_NOTHING = {"", "None", "none", "null", "True", "true", "False", "false", MARK}
NEXT_FLAG = re.compile(r"--[a-z][a-z0-9-]*(?:[=\s]|\Z)")
"""What follows a flag without a value."""
_LINE_END = re.compile(r"[\"'\n]")
_LINE_HEAD = re.compile(r"[ \t]*(?:-[ \t]+)?(?:export[ \t]+)?\Z")
_LAST_WORD = re.compile(r"\S+[ \t\r]*(?:#.*)?(?:\n|\Z)")
_STRONG = re.compile(r"(?i)pass(?:word|wd|phrase)|secret|api.?key|access.?key|credential")


def redact_text(text: str) -> str:
    """`text` with `MARK` where secrets were: see `distributed.redaction`.

    Takes time in proportion to the length of `text`; a second pass changes nothing.
    """
    return scan(text, certain=False)


def scan(text: str, certain: bool) -> str:
    """As `redact_text`.

    Args:
        certain: leave what may be none: a value that is looked up or a path, a user name alone.
    """
    if not _MAY_HOLD.search(text):
        return text
    text = _without_pem(text)
    for find in (find_userinfo, find_without_scheme):
        text = _replaced(text, find(text, certain))
    text = _replaced(text, _find_named(text, certain))
    text = _TOKENS.sub(MARK, text)
    return _SPOKEN.sub(_hide_group, text)


def _replaced(text: str, spans: Iterable[tuple[int, int]]) -> str:
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], MARK]
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def _hide_group(match: re.Match[str]) -> str:
    start, end = match.span(str(match.lastgroup))
    return match[0][: start - match.start()] + MARK + match[0][end - match.start() :]


def _without_pem(text: str) -> str:
    """`text` without the bodies of PEM blocks; one that is cut off ends with the text."""
    at, parts, done = text.find(_PEM), [], 0
    while at != -1:
        head = text.find("-----", at + len(_PEM))
        if head == -1:
            break
        begin = head + 5
        end = text.find("-----END", begin)
        parts += [text[done:begin], MARK]
        done = len(text) if end == -1 else end
        at = text.find(_PEM, done)
    return "".join([*parts, text[done:]]) if parts else text


def _find_named(text: str, certain: bool) -> list[tuple[int, int]]:
    """Where the values of names are that `is_secret_name` takes for secrets."""
    found: list[tuple[int, int]] = []
    at = 0
    while (match := _NAMED.search(text, at)) is not None:
        at, name = match.end(), match["name"]
        before = text[match.start() - 1] if match.start() else ""
        if not is_secret_name(name, query=bool(before) and before in "?&;#"):
            at = match.end("name")
            continue
        span = _flag_value(text, match) if match["flag"] else _value(text, match, before, certain)
        if span is None:
            at = match.end("name")
            continue
        start, end = span
        value = text[start:end]
        at = max(at, end)
        if value not in _NOTHING and not (certain and value[0] in "/~.$`"):
            found.append((start, end))
    return found


def _flag_value(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    """The value of ``--password value``."""
    if not match["name"].startswith("-") or NEXT_FLAG.match(text, match.end()):
        return None
    return _plain_value(text, match.end())


def _value(text: str, match: re.Match[str], before: str, certain: bool) -> tuple[int, int] | None:
    """The value of ``name=value``, ``"name": value`` and the like; None where the sign is prose or code."""
    start, name = match.end(), match["name"].lower()
    quoted = match["close"] or _OPENING.match(text, start)
    if match["sign"] == ":":
        if not match["close"] and _is_header(name):
            end = _LINE_END.search(text, start)
            return start, end.start() if end is not None else len(text)
        strong = not certain and _STRONG.search(name)
        if match["gap"] and not (quoted or strong or _ends_line(text, match)):
            return None
        return _plain_value(text, start)
    # `password = ask()` and `password == x` are code, and `password = 'x'` is not.
    is_value = quoted or _ends_line(text, match)
    if (match["gap"] or match["pad"]) and (text.startswith("=", start) or not is_value):
        return None
    return _plain_value(text, start)


def _is_header(name: str) -> bool:
    """Whether `name` is that of a header of HTTP, whose value takes the rest of the line."""
    return name in ("authorization", "cookie") or ("-" in name and not name.startswith("-"))


def _ends_line(text: str, match: re.Match[str]) -> bool:
    """Whether the line holds nothing but this name and one word, as lines of YAML and INI files do."""
    line = text.rfind("\n", max(0, match.start() - 80), match.start())
    first = line + 1 if line != -1 else max(0, match.start() - 80)
    head = _LINE_HEAD.match(text, first, match.start())
    return head is not None and _LAST_WORD.match(text, match.end()) is not None


def _plain_value(text: str, start: int) -> tuple[int, int]:
    """The value at `start`: what its quotes hold, or up to a blank, the next pair, or closing punctuation."""
    opening = _OPENING.match(text, start)
    if opening is not None:
        start = opening.end()
        end = find_closing(text, start, opening["quote"])
        if end != -1:
            return start, end
    found = _PLAIN_END.search(text, start)
    end = found.start() if found is not None else len(text)
    return start, start + len(text[start:end].rstrip(_CLOSING))
