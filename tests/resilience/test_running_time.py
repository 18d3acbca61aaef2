"""A suspended job (SIGSTOP to all its processes, as by ``scontrol suspend``) is no hung one when it wakes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.communication.rendezvous import Rendezvous
from distributed.resilience.monitor_process import _BOOT
from distributed.resilience.phase_journal import Journal
from tests.support import commands

pytestmark = pytest.mark.starts_processes

TRAIN = """
import os
from pathlib import Path
import torch
from torch import nn
from distributed import Callback, Trainer

class Wait(Callback):
    all_ranks = True
    def on_step_end(self, context):
        if context.progress.step == 3:
            with open(f"ready_{context.world.rank}", "w") as ready:
                ready.write(str(os.getpid()))
            open(f"go_{context.world.rank}").read()

data = torch.randn(24, 4), torch.zeros(24, dtype=torch.long)
trainer = Trainer(nn.Linear(4, 2), num_processes=2, global_batch_size=4, device="cpu", callbacks=[Wait()],
                  hang_timeout=12)
assert len(trainer.fit(data).steps["step"]) == 6
"""


def suspend(pids: Sequence[int], seconds: float) -> None:
    """Stop the processes, and return after that time; it is the duration that is tested."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            os.sched_yield()
    select.select([], [], [], seconds)


def let_go(pipe: Path, reader: int) -> None:
    """Open `pipe` for the process that waits in it, unless that process ends before."""
    while psutil.pid_exists(reader):
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            return
        except OSError:  # nobody reads yet
            select.select([], [], [], 0.05)


def test_a_run_trains_on_after_a_suspension_longer_than_hang_timeout(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("ready_0", "ready_1", "go_0", "go_1"):
        os.mkfifo(tmp_path / name)
    run = commands.start(
        [sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with run:
        ranks = [int((tmp_path / f"ready_{rank}").read_text()) for rank in range(2)]
        suspend([run.pid, *ranks], 15)
        # The launcher wakes first, and checks ranks that are still stopped.
        launcher = psutil.Process(run.pid)
        before = launcher.num_ctx_switches().voluntary
        os.kill(run.pid, signal.SIGCONT)
        while launcher.num_ctx_switches().voluntary < before + 6 and run.poll() is None:
            select.select([], [], [], 0.05)
        for rank, pid in enumerate(ranks):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
                let_go(tmp_path / f"go_{rank}", pid)
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a rank, whose journal the test keeps."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_the_monitor_of_joined_ranks_counts_only_the_time_in_which_it_ran(
    rank: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    journal = Journal(tmp_path, 0)
    journal.enter("forward", step=2)
    order: dict[str, Any] = {"hosts": None, "path": sys.path, "folder": str(tmp_path), "own": False}
    order |= {"pids": {0: rank.pid}, "limits": {"stall_report": 1.0, "hang_timeout": 5.0}}
    command = [sys.executable, "-P", "-c", _BOOT]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as monitor:
        assert monitor.stdin is not None
        assert monitor.stderr is not None
        monitor.stdin.write(json.dumps(order) + "\n")
        monitor.stdin.flush()
        assert "has made no progress" in monitor.stderr.readline()
        while "is making progress again" not in monitor.stderr.readline():
            journal.enter("forward", step=2)
        suspend([monitor.pid], 8)
        os.kill(monitor.pid, signal.SIGCONT)
        # It reports the stall after the first limit, and ends the rank after the second one.
        line = monitor.stderr.readline()
        assert "has made no progress" in line
        assert "was stopped" not in line
        assert rank.wait(60) == -signal.SIGKILL


HOST = """
import sys, threading
from distributed.resilience.host_heartbeat import HostHeartbeat

node, port = int(sys.argv[1]), int(sys.argv[2])
watch = HostHeartbeat(("127.0.0.1", port), node, (node,), 3.0, "a run")
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.3):
    lost = watch.lost
    print(f"lost {lost.node}" if lost else "met" if watch._peers else "alone", flush=True)
watch.close()
"""


def test_hosts_that_were_suspended_together_do_not_lose_each_other() -> None:
    with Rendezvous("127.0.0.1", 0, 3) as place:
        command = [sys.executable, "-c", HOST]
        hosts = [
            commands.start(
                [*command, str(node), str(place.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for node in range(2)
        ]
        with hosts[0], hosts[1]:
            for host in hosts:
                while host.stdout.readline() != "met\n":
                    pass
            suspend([host.pid for host in hosts], 7)
            os.kill(hosts[1].pid, signal.SIGCONT)
            seen = [hosts[1].stdout.readline() for _ in range(4)]
            os.kill(hosts[0].pid, signal.SIGCONT)
            assert seen == ["met\n"] * 4
            hosts[0].kill()
            while (line := hosts[1].stdout.readline()) == "met\n":
                pass
            assert line == "lost 0\n"
            hosts[1].stdin.close()
