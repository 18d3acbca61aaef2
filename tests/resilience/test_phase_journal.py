"""A journal that another process reads while a rank writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest

from distributed.resilience.phase_journal import Entry, Journal
from tests.support import commands

WRITER = """
import subprocess
import sys
from pathlib import Path
from distributed.resilience.phase_journal import Journal
journal = Journal(Path(sys.argv[1]), 0)
print("open", flush=True)
while True:
    journal.enter("forward")
"""


@pytest.mark.starts_processes
def test_no_entry_is_older_than_the_journal(tmp_path: Path) -> None:
    """A time of 0 would mean no progress since the host started: the monitor would end a healthy run."""
    began = perf_counter()
    with commands.start([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline()
            entries = [Entry.read(Journal.path(tmp_path, 0)) for _ in range(20_000)]
        finally:
            writer.kill()
    assert min(entry.since for entry in entries if entry) > began
