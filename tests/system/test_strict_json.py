"""JSON of unknown origin: what is refused, and that large texts cost no collections of garbage."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import pytest

from distributed.system.strict_json import MAX_DEPTH, parse_json
from tests.support import commands

MANY = '{"padding":[' + '{"a":[1]},' * 100_000 + "0]}"


def collections_during(text: str) -> int:
    """Collections that `parse_json` of `text` begins."""
    begun = []

    def count(phase: str, info: dict[str, Any]) -> None:
        begun.append(phase)

    gc.callbacks.append(count)
    try:
        parse_json(text)
    except ValueError:
        pass
    finally:
        gc.callbacks.remove(count)
    return begun.count("start")


@pytest.mark.parametrize("text", [MANY, MANY[:-1], "[" * 150 + MANY + "]" * 150], ids=["good", "cut", "deep"])
def test_no_garbage_is_looked_for_while_a_text_is_parsed(text: str) -> None:
    """With them, a manifest of 100,000 tensors takes more than twice as long to read."""
    assert gc.isenabled()
    gc.collect()
    assert collections_during(text) <= 1  # Of what the test itself leaves.
    assert gc.isenabled()


def test_a_process_without_collections_stays_without() -> None:
    gc.disable()
    try:
        parse_json("[1]")
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("text", "why"), [
    ('{"a":{"b":1,"c":2,"b":3}}', "the key 'b' is set twice"),
    ("[" * (MAX_DEPTH + 2) + "1" + "]" * (MAX_DEPTH + 2), "nested deeper than 200 levels"),
    ('{"a":' * (MAX_DEPTH + 2) + "1" + "}" * (MAX_DEPTH + 2), "nested deeper than 200 levels"),
    ("[" * 1_000_000 + "]" * 1_000_000, "nested deeper than 200 levels"),
], ids=["key", "lists", "objects", "million"])  # fmt: skip
def test_what_no_writer_writes_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


@pytest.mark.parametrize("text", ["7", '"a"', "[]", "{}", "[[],{}]", "[" * MAX_DEPTH + "]" * MAX_DEPTH, MANY])
def test_other_texts_are_parsed_as_by_json(text: str) -> None:
    assert parse_json(text) == json.loads(text)


LIMITED = """
import os, resource
from distributed.system.strict_json import parse_json

text = '{"padding":[' + '{"a":[1]},' * 1_000_000 + "0]}"
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse_json(text)
except ValueError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10)
"""


@pytest.mark.starts_processes
def test_what_does_not_fit_into_memory_is_refused_before_it_is_parsed() -> None:
    """A process that may take 200 MB more refuses 250 MB of values, and takes less than 50 MB for that."""
    command = [sys.executable, "-c", LIMITED]
    done = commands.run(command, capture_output=True, text=True, timeout=60, fresh=True)
    assert done.stdout.splitlines() == ["there is no memory for its values", "True"], done.stderr
