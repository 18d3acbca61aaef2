"""Count words of a private dialect in the product and its pages: ``python -m docs.site.dialect``.

Counted are comments, docstrings and string literals of two words or more in the four source folders, and the
text of the hand-written pages. Code blocks, inline code, regions between ``<!-- name -->`` and ``<!-- end of
name -->``, and released versions of the changelog are left out. ``docs/style.md`` gives the word to use
instead, and ``dialect_allowed.txt`` lists the places where a word is right.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["WORDS", "Hit", "Rule", "main", "search"]

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("dialect_allowed.txt")
SOURCES = ("distributed", "backends", "plugins", "kernels")
GENERATED = ("docs/cli.md", "docs/messages.md", "docs/mutants.md", "docs/reference.md", "docs/style.md")
"""Pages made from the program, whose source is counted, and the page that quotes the words."""

WORDS = {
    "say": r"say|says|said|saying",
    "tell": r"tell|tells|told|telling",
    "hear": r"hear|hears|heard|hearing|ear",
    "nobody": r"nobody|somebody|anybody|everybody|whoever|whosoever|stranger|strangers",
    "go on": r"(?:go|goes|going|gone|went) on",
    "come and go": r"(?:come|comes|came|coming) (?:and|or) (?:go|goes|went|gone|going)",
    "started again": r"(?:start|starts|started|starting) again",
    "figure": r"figure|figures",
    "wish": r"wish|wishes|wished",
    "mend": r"mend|mends|mended|mending",
    "anew": r"anew",
    "alike": r"alike",
    "in vain": r"in vain",
    "for ever": r"for ever",
    "sign of life": r"signs? of life",
    "stand by": r"(?:stand|stands|stood|standing) (?:by|still)",
    "make room": r"(?:make|makes|made|making) room",
    "room": r"rooms",
    "dear": r"dear|dearer",
    "hold up": r"(?:hold|holds|held|holding) up",
    "whole of": r"the whole of",
}
"""Name of a group of words -> the pattern of its forms."""

_PATTERN = re.compile(
    r"\b(?:" + "|".join(f"(?P<g{i}>{pattern})" for i, pattern in enumerate(WORDS.values())) + r")\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"``.+?``|`[^`\n]+`|<code>.*?</code>|\]\([^)\s]+\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_REGION = re.compile(r"^<!-- (\w[\w -]*) -->.*?^<!-- end of (?:\1|\w+) -->", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Hit:
    """One use of a counted word.

    Attributes:
        part: column of the table: a source folder, ``docs``, ``README`` or ``CHANGELOG``.
        path: file, relative to the repository.
        line: line number, from 1.
        word: name of the group in `WORDS`.
        text: the line.
    """

    part: str
    path: str
    line: int
    word: str
    text: str


@dataclass(frozen=True)
class Rule:
    """One row of the allow list: uses of `word` in files that match `pattern` are right, for `reason`."""

    pattern: str
    word: str
    reason: str

    def allows(self, hit: Hit) -> bool:
        """Whether the rule covers `hit`."""
        return self.word == hit.word and fnmatch(hit.path, self.pattern)


def search() -> list[Hit]:
    """Every hit in the source folders and the hand-written pages, by file and line."""
    found: list[Hit] = []
    for part, path in _files():
        text = path.read_text(encoding="utf-8")
        pieces = _python(text) if path.suffix == ".py" else _markdown(text, changelog=part == "CHANGELOG")
        name = path.relative_to(ROOT).as_posix()
        found += sorted(
            (hit for line, words in pieces for hit in _hits(part, name, line, words)),
            key=lambda hit: (hit.line, hit.word),
        )
    return found


def _files() -> Iterator[tuple[str, Path]]:
    for part in SOURCES:
        for path in sorted((ROOT / part).rglob("*.py")):
            yield part, path
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
    pages += sorted((ROOT / "examples").rglob("*.md"))
    for path in pages:
        if path.relative_to(ROOT).as_posix() not in GENERATED:
            yield "docs", path
    yield "README", ROOT / "README.md"
    yield "CHANGELOG", ROOT / "CHANGELOG.md"


def _hits(part: str, path: str, first: int, text: str) -> Iterator[Hit]:
    """The hits in `text`, whose first line is line `first` of its file."""
    lines = text.split("\n")
    without_code = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in _PATTERN.finditer(re.sub(r"\n", " ", without_code)):
        row = text.count("\n", 0, match.start())
        word = list(WORDS)[int(str(match.lastgroup)[1:])]
        yield Hit(part, path, first + row, word, lines[row].strip())


def _python(text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of each comment, docstring and string of at least two words."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            # Parts of a string over several lines, and of an f-string, are reported at its first line.
            yield node.lineno, node.value


def _markdown(text: str, *, changelog: bool) -> Iterator[tuple[int, str]]:
    """(1, text) of a page, what is not counted replaced by as many empty lines."""
    if changelog:
        text = re.split(r"^## \[\d", text, maxsplit=1, flags=re.MULTILINE)[0]
    for pattern in (_FENCE, _REGION):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    yield 1, text


def _rules() -> list[Rule]:
    rows = []
    for line in ALLOWED.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, word, reason = (cell.strip() for cell in line.split("|"))
            if word not in WORDS:
                raise ValueError(f"{ALLOWED.name}: unknown word {word!r}; known: {', '.join(WORDS)}")
            rows.append(Rule(pattern, word, reason))
    return rows


def _table(hits: Iterable[Hit], allowed: Iterable[Hit]) -> str:
    parts = [*SOURCES, "docs", "README", "CHANGELOG"]
    counts = Counter((hit.word, hit.part) for hit in hits)
    rows = {word: [counts[word, part] for part in parts] for word in WORDS}
    rows["total"] = [sum(counts[word, part] for word in WORDS) for part in parts]
    spared = Counter(hit.part for hit in allowed)
    rows["allowed"] = [spared[part] for part in parts]
    lines = [f"{'':14}" + "".join(f"{part:>12}" for part in [*parts, "total"])]
    lines += [f"{word:14}" + "".join(f"{n:12}" for n in [*row, sum(row)]) for word, row in rows.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; exit code 1 above ``--max``."""
    parser = argparse.ArgumentParser(prog="python -m docs.site.dialect", description=__doc__)
    parser.add_argument("--list", action="store_true", help="each hit that is not allowed, as file:line")
    parser.add_argument("--part", action="append", help="list and count this column only; may be repeated")
    parser.add_argument("--max", type=int, metavar="N", help="exit with 1 above N hits that are not allowed")
    args = parser.parse_args(arguments)
    rules = _rules()
    found = [hit for hit in search() if not args.part or hit.part in args.part]
    allowed = [hit for hit in found if any(rule.allows(hit) for rule in rules)]
    counted = [hit for hit in found if hit not in allowed]
    if args.list:
        for hit in counted:
            print(f"{hit.path}:{hit.line}: {hit.word}: {hit.text}")
    print(_table(counted, allowed))
    if not args.part:
        for rule in rules:
            if not any(rule.allows(hit) for hit in found):
                print(f"{ALLOWED.name}: {rule.pattern} | {rule.word}: no such use; remove the row")
    if args.max is not None and len(counted) > args.max:
        print(f"{len(counted)} hits, allowed: at most {args.max}. Rewrite them, see docs/style.md")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
