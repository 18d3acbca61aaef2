"""The progress bar on a pseudo-terminal, and what is printed without one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from distributed_plugins.progress import ProgressBar, register_callbacks

from distributed.config import DistributedConfig
from tests.support import commands

pytestmark = pytest.mark.starts_processes

RUN = """
    import random, sys
    from distributed.config import DistributedConfig
    from distributed.interfaces.placement import World
    from distributed.interfaces.callback import Context
    from distributed.interfaces.task import Progress
    from distributed_plugins.progress import register_callbacks

    class Run(Context):
        world, steps_per_epoch, total_steps = World(), 4, 108
        progress = Progress(step=100)
        def request_stop(self, reason): ...
        def log(self, name, value): ...

    run = Run()
    (bar,) = register_callbacks(DistributedConfig(tracking={"progress": sys.argv[1]}))
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        del sys.modules[name]  # imported before the fork, if this process is one
    before = random.getstate()
    bar.on_run_start(run)
    assert random.getstate() == before, "the bar draws random numbers of training"
    for epoch in range(2):
        run.progress.epoch = epoch
        for _ in range(4):
            run.progress.step += 1
            bar.on_step_end(run)
            bar.on_log(run, {"loss": 0.5, "samples_per_second": 1234.0})
        print("from the user")
        bar.on_epoch_end(run, {"epoch": epoch, "train_loss": 0.5, "val_accuracy": 0.75})
    bar.on_run_end(run, "finished")
"""
LINES = [
    "epoch 0  step 104  train_loss 0.5  val_accuracy 0.75",
    "epoch 1  step 108  train_loss 0.5  val_accuracy 0.75",
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.py"
    path.write_text(dedent(RUN))
    return path


def on_a_terminal(script: Path, mode: str, stdout: int | None = None) -> str:
    """What the run draws on a pseudo-terminal 120 columns wide."""
    master, slave = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = commands.start(
        [sys.executable, script, mode], stdin=slave, stdout=stdout or slave, stderr=slave, env=environment
    )
    os.close(slave)
    drawn = b""
    try:
        while chunk := os.read(master, 65536):
            drawn += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(master)
    assert process.wait() == 0
    return drawn.decode()


def test_a_terminal_sees_the_bar_and_a_line_per_epoch(script):
    drawn = on_a_terminal(script, "auto")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    assert "epoch 1 ━" in text
    assert "108/108 loss 0.5  1234 samples/s" in text
    assert all(line in text for line in LINES)
    assert "from the user" in text
    # The cursor is hidden while the bar moves and shown afterwards.
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_without_a_terminal_there_is_one_line_per_epoch(script):
    done = commands.run([sys.executable, script, "auto"], capture_output=True, check=True)
    assert done.stderr.splitlines() == LINES
    assert done.stdout == "from the user\n" * 2


def test_what_the_user_prints_to_a_file_stays_there(script, tmp_path):
    with open(tmp_path / "out.txt", "w+") as out:
        drawn = on_a_terminal(script, "auto", stdout=out.fileno())
        out.seek(0)
        assert out.read() == "from the user\n" * 2
    assert "━" in drawn


def test_on_draws_wherever_it_leads(script):
    done = commands.run(
        [sys.executable, script, "on"],
        capture_output=True,
        check=True,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert "108/108" in done.stderr


def test_off_registers_nothing_and_steps_cost_nothing():
    assert register_callbacks(DistributedConfig(tracking={"progress": "off"})) == []
    (bar,) = register_callbacks(DistributedConfig())
    assert isinstance(bar, ProgressBar)
    assert "on_step_end" not in vars(ProgressBar)
    assert not bar.all_ranks
