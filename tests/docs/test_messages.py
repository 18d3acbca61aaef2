"""A user who searches for a message finds it: every error and warning has its entry."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from docs.site.messages import DYNAMIC, GAP, Message, collect, dynamic_places

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
FROM_BELOW = "\n## Errors from torch"


def entries(text: str) -> list[str]:
    """The messages in code in the first column of the tables of `text`."""
    cells = re.findall(r"^\| (.+?) \| ", text, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def ours() -> list[str]:
    """Messages on the page that are said to be the program's own."""
    return entries(PAGE.read_text(encoding="utf-8").partition(FROM_BELOW)[0])


def without_entry(found: list[str]) -> list[Message]:
    """Messages that say nothing of what to do, and are not on the page either."""
    begins = tuple(entry.strip(f"{GAP}. ") for entry in found)
    return [m for m in collect() if not m.advice and not m.text.lstrip(f"{GAP}. ").startswith(begins)]


@cache
def said() -> str:
    """Every text in the source, what is filled in as an ellipsis."""
    texts = []
    for room in ("distributed", "backends", "plugins"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join([*texts, *(message.text for message in collect())])


def test_a_message_without_advice_has_an_entry() -> None:
    assert without_entry(ours()) == [], "explain it in docs/troubleshooting.md"


def test_an_entry_that_is_missing_is_noticed() -> None:
    found = [entry for entry in ours() if not entry.startswith("DeepSpeed refuses it")]
    assert [m.place for m in without_entry(found)] == ["backends/distributed_backends/deepspeed/engine.py"]


def test_entries_are_what_the_program_says() -> None:
    for entry in ours():
        for piece in filter(None, map(str.strip, entry.split(GAP))):
            assert piece in said(), f"docs/troubleshooting.md: nothing says {entry!r} any more"


def test_messages_in_the_words_of_others_are_known() -> None:
    assert dynamic_places() == set(DYNAMIC)


def test_what_is_collected_is_what_a_user_sees() -> None:
    """A few of every kind, as they were met in the tests of the program."""
    texts = {message.text: message for message in collect()}
    split = next(m for text, m in texts.items() if text.startswith("it cannot be split evenly"))
    assert (split.field, split.kind) == ("global_batch_size", "error")
    assert "nearest" in split.advice
    assert texts["passing over …: …"].kind == "warning"
    assert any(m.place.startswith("kernels/") for m in texts.values())
    assert len(texts) > 250
