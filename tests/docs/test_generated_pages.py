"""Pages that are made from the program say what the program says now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed.commands import VERBS
from distributed.commands.operations import OPERATIONS
from distributed.commands.parser import flags_of
from docs.site.command_line import parsers
from docs.site.generate import generated

ROOT = Path(__file__).parents[2]
CLI = ROOT / "docs" / "cli.md"


@pytest.mark.parametrize(
    "page",
    ["architecture.svg", "backends.md", "cli.md", "communication-codecs.md", "messages.md", "reference.md"],
)
def test_a_generated_page_is_current(page: str) -> None:
    (path,) = [path for path in generated() if path.name == page]
    hint = f"{page} is not current: run `python -m docs.site.generate`, and look at what changed"
    assert path.read_text(encoding="utf-8") == generated()[path], hint


def missing_flags(page: str) -> list[str]:
    """Flags that a verb's ``--help`` has and `page` has not, by what the user sees."""
    missing = []
    for verb in (*VERBS, *OPERATIONS):
        for parser in parsers(verb.name):
            for flag in set(flags_of(parser)) - {"--help"}:
                if not re.search(rf"(?<![\w-]){flag}(?![\w-])", page):
                    missing.append(f"{verb.name}: {flag}")
    return missing


def test_every_verb_and_every_flag_is_documented() -> None:
    page = CLI.read_text(encoding="utf-8")
    for verb in (*VERBS, *OPERATIONS):
        assert f"\n## {verb.name}\n" in page
    assert missing_flags(page) == []


def test_a_flag_that_is_left_out_is_noticed() -> None:
    page = CLI.read_text(encoding="utf-8").replace("--gradient-clipping", "--clip")
    assert {line.partition(": ")[2] for line in missing_flags(page)} == {"--gradient-clipping"}
