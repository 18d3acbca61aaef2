"""The watch of ranks that somebody else started: to be watched is a help, never a reason to fail."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from distributed import WorkerError
from distributed.resilience.failure_reports import FailureReport
from distributed.resilience.monitor_process import _BOOT, _monitor_ranks, _nodes
from distributed.resilience.phase_journal import ENDED, Journal
from distributed.resilience.rank_monitor import Limits, RankMonitor
from tests.support import commands
from tests.support.ports import free_port

# What makes one machine look like several: a name of one's own, and no way to the others' files.
HOST = """
import os, socket, sys
from pathlib import Path
name, mine = os.environ["HOST"], os.environ["TMPDIR"]
socket.gethostname = lambda: name
opened = os.open
def own_files_only(path, *args, **options):
    if "distributed-watch-" in str(path) and not str(path).startswith(mine):
        raise FileNotFoundError(2, "on another host", str(path))
    return opened(path, *args, **options)
os.open = own_files_only
import torch
from torch import nn
from distributed import Callback, Trainer

class Look(Callback):
    all_ranks = True
    def on_step_end(self, context):
        watched = [str(path) for path in Path(mine).glob("distributed-watch-*/journal_*")]
        os.write(1, (" ".join(["watched", *map(os.path.basename, watched)]) + chr(10)).encode())

data = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
trainer = Trainer(nn.Linear(4, 2), batch_size=2, device="cpu", callbacks=[Look()])
assert trainer.fit(data, epochs=1).world_size == 2
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["watched journal_0", "watched journal_1"]),
        (["a", "a"], ["watched journal_0", "watched"]),
    ],
)
def test_ranks_that_share_a_number_and_no_files(
    names: list[str], expected: list[str], tmp_path: Path
) -> None:
    """RANK and its like set by hand say nothing of hosts. Those of one name may be containers."""
    (tmp_path / "train.py").write_text(HOST)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, name in enumerate(names):
        (own := tmp_path / f"{rank}").mkdir()
        env = {**os.environ, **given, "RANK": str(rank), "HOST": name, "TMPDIR": str(own)}
        command = [sys.executable, str(tmp_path / "train.py")]
        ranks.append(commands.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = commands.finish(ranks, timeout=120)
    said = [[line for line in out.splitlines() if "watched" in line] for out, _ in outputs]
    assert said == [[expected[0]], [expected[1]]]


def test_hosts_are_told_apart_by_number_and_name() -> None:
    assert _nodes([(0, "a"), (0, "b"), (1, "a"), (1, "b")]) == [[0], [1], [2], [3]]  # mpirun --map-by node
    assert _nodes([(0, "a"), (1, "b"), (0, "a"), (1, "b")]) == [[0, 2], [1, 3]]  # srun, cyclic
    assert _nodes([(0, "one"), (0, "one"), (1, "one")]) == [[0, 1], [2]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Two "ranks" with journals in `tmp_path`: the first has ended, the second hangs in its first step."""
    gone, hung = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "600"])
    gone.wait()
    first, second = Journal(tmp_path, 0), Journal(tmp_path, 1)
    first.enter("finish", step=2)
    first.end(ENDED)
    second.enter("forward", step=1)
    yield gone, hung
    hung.kill()
    hung.wait()


def test_a_hang_is_ended_though_nobody_reads_of_it(ranks: Any, tmp_path: Path) -> None:
    gone, hung = ranks
    order: dict[str, Any] = {"hosts": None, "path": sys.path, "folder": str(tmp_path), "own": False}
    order |= {"pids": {0: gone.pid, 1: hung.pid}, "limits": {"stall_report": 0.1, "hang_timeout": 0.4}}
    reader, writer = os.pipe()
    os.close(reader)  # as a terminal that was closed
    command = [sys.executable, "-P", "-c", _BOOT]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=writer)
    os.close(writer)
    try:
        assert watcher.stdin is not None
        watcher.stdin.write(json.dumps(order).encode() + b"\n")
        watcher.stdin.flush()
        assert hung.wait(timeout=20) == -signal.SIGKILL
        assert watcher.wait(timeout=60) == 0
    finally:
        watcher.kill()
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["rank"], verdict["exc_type"]) == (1, "Hang")


class _Lost(RankMonitor):
    def look(self, pids: Mapping[int, int]) -> None:
        raise WorkerError("host other is gone", rank=7, host="other", exc_type="HostLost")


def test_the_verdict_and_the_end_come_before_the_word(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has ended meanwhile spares no other, and neither does a full or closed pipe."""
    gone, hung = ranks

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            assert hung.wait(timeout=20) == -signal.SIGKILL
            assert FailureReport.read(tmp_path) is not None
            raise BrokenPipeError

    monkeypatch.setattr("select.select", lambda *_: ([], [], []))
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(BrokenPipeError):
        _monitor_ranks(_Lost(tmp_path, Limits()), {0: gone.pid, 1: hung.pid})
