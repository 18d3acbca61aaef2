"""User names and passwords in addresses, found without parsing: a password may hold any character."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from distributed.redaction.names import is_secret_name
from distributed.redaction.quotes import find_closing

__all__ = ["find_userinfo", "find_without_scheme"]

_SCHEME = frozenset(string.ascii_letters + string.digits + "+.-")
_BLANK = re.compile(r"\s")
_AUTHORITY_END = re.compile(r"[/?#\\]")
_PORT = re.compile(r"\d{1,5}")
_DIGEST = re.compile(r"sha\d+:")
_WORD = re.compile(r"\S+")
_HOST = re.compile(r"[A-Za-z][\w.-]*(?::\d+)?(?:[/?,;'\")\]}]|\Z)")
_USER = frozenset("_.%+~@-")
_FAR = 100
"""Characters after a blank in which the rest of a password is searched."""


def find_userinfo(text: str, certain: bool) -> Iterator[tuple[int, int]]:
    """Where in `text` the user names and passwords of ``scheme://user:password@host`` are.

    Args:
        certain: leave out what may be something else: a user name alone, ``host:80/path@version``.
    """
    at, done, blank = text.find("://"), 0, -1
    known_end = last = -1
    while at != -1:
        start = at + 3
        if start >= done:
            # What was found for a URL holds for those inside it: a search for each would take n x n steps.
            if start > blank:
                found_blank = _BLANK.search(text, start)
                blank = found_blank.start() if found_blank is not None else len(text)
            end = _end_of_url(text, at, blank)
            if end != known_end:
                known_end, last = end, text.rfind("@", start, end)
            found = _end_of_userinfo(text, at, end, last if last >= start else -1, certain)
            if found is not None:
                yield start, found
                done = found
        at = text.find("://", max(start, done))


def _begin_of_scheme(text: str, at: int) -> int:
    while at and text[at - 1] in _SCHEME:
        at -= 1
    return at


def _end_of_url(text: str, at: int, end: int) -> int:
    """Where the URL whose ``://`` is at `at` ends: at its closing quote, the blank at `end`, or the next URL
    of a list."""
    start, first = at + 3, _begin_of_scheme(text, at)
    if first and text[first - 1] in "\"'`":
        begin = first - 1
        while begin and first - begin < 20 and text[begin - 1] == "\\":
            begin -= 1
        closing = find_closing(text, start, text[begin:first])
        if closing != -1:
            return closing
    following = text.find("://", start, end)
    if following != -1:
        next_first = _begin_of_scheme(text, following)
        if next_first > start and text[next_first - 1] in ",;|&=([{'\"":
            return next_first - 1
    return end


def _end_of_userinfo(text: str, at: int, end: int, last: int, certain: bool) -> int | None:
    """The position of the ``@`` that ends the userinfo, None without one."""
    start = at + 3
    slash = _AUTHORITY_END.search(text, start, end)
    stop = slash.start() if slash is not None else end
    if text.startswith("[", start):
        return None  # an IPv6 address
    inside = text.rfind("@", start, stop)
    if inside == -1:
        return _end_of_odd_password(text, start, stop, end, last, certain)
    if ":" in text[start:inside]:
        if certain and text[inside - 1] == ":" and last == inside:
            return None  # no password: it was looked up
        return last  # a later @ may be the password's: rather the host goes than a part of it stays
    user, scheme = text[start:inside], text[_begin_of_scheme(text, at) : at].lower()
    if user == "git" or scheme.endswith(("ssh", "sftp", "rsync")):
        return None
    return None if certain and not ("http" in scheme and len(user) >= 20) else inside


def _end_of_odd_password(text: str, start: int, stop: int, end: int, last: int, certain: bool) -> int | None:
    """As `_end_of_userinfo` where no ``@`` comes before the first slash: a password may hold slashes."""
    colon = text.find(":", start, stop)
    if colon == -1:
        return None
    begin = text[colon + 1 : stop]
    is_port = _PORT.fullmatch(begin) is not None or not begin
    if last > colon:
        return None if certain and is_port else last
    if is_port or stop < end or begin[0] in "${<" or certain:
        return None
    # The rest of a password with a blank in it.
    line = text.find("\n", end, end + _FAR)
    far = end + _FAR if line == -1 else line
    found = text.find("@", end, far)
    return found if found != -1 and text.find("://", end, found) == -1 else None


def find_without_scheme(text: str, certain: bool) -> Iterator[tuple[int, int]]:
    """Where the user names and passwords of ``user:password@host`` are, where no scheme precedes them."""
    for word in _WORD.finditer(text) if "@" in text and ":" in text else ():
        first, end = word.span()
        scheme = text.find("://", first, end)
        if scheme != -1:
            end = _begin_of_scheme(text, scheme)
        last = text.rfind("@", first, end)
        found = _begin_of_user(text, first, last) if last != -1 and last + 1 < end else None
        if (
            found is None
            or _DIGEST.match(text, last + 1)
            or not (text[last + 1].isalnum() or text[last + 1] == "[")
        ):
            continue
        user, colon = text[found : text.find(":", found)], text.find(":", found)
        if certain and ("@" in user or text[colon + 1] in "/\\" or not _HOST.match(text, last + 1, end)):
            continue
        yield found, last


def _begin_of_user(text: str, first: int, last: int) -> int | None:
    """Where the user name before the first colon of ``text[first:last]`` begins that has one."""
    begin, colon = first, text.find(":", first, last)
    while colon != -1:
        start = colon
        while start > begin and (text[start - 1].isalnum() or text[start - 1] in _USER):
            start -= 1
        user = text[start:colon]
        alone = not user and (colon == first or text[colon - 1] in "=(")  # redis: `:password@host`
        if colon + 1 < last and (alone or any(map(str.isalpha, user))):
            is_other = user.startswith("git@") or user == "mailto" or is_secret_name(user)
            return None if is_other else start
        begin, colon = colon + 1, text.find(":", colon + 1, last)
    return None
