"""Two real runs in one directory: the second is refused, and the first loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.checkpoint.checkpointer import PortableCheckpointer
from tests.support import commands

pytestmark = pytest.mark.starts_processes

RUN = """
import json, sys

import torch
from distributed import Callback, Trainer

folder, seed, *words = sys.argv[1:]


class Hold(Callback):
    def on_step_end(self, context):
        if "hold" in words and context.progress.step == 2:
            context.finish_saving()
            print("holding", flush=True)
            sys.stdin.readline()


torch.manual_seed(int(seed))
trainer = Trainer(
    torch.nn.Linear(4, 2), num_processes=1, device="cpu", global_batch_size=4, checkpoint_dir=folder,
    tracking={"progress": "off"}, max_steps=4, checkpoint={"every_n_steps": 1, "keep_last": 2},
    resume_from_checkpoint="resume" in words, callbacks=[Hold()],
)
x = torch.randn(64, 4)
history = trainer.fit((x, (x[:, 0] > 0).long()))
print(json.dumps([history.steps.get("step", []), history.checkpoint]))
"""


def start(folder: Path, seed: int, *words: str) -> Any:
    command = [sys.executable, "-c", RUN, str(folder), str(seed), *words]
    pipe = subprocess.PIPE
    return commands.start(command, stdin=pipe, stdout=pipe, stderr=pipe)


def wait_until_holding(process: Any) -> None:
    for line in process.stdout:
        if line == "holding\n":
            return
    pytest.fail(process.stderr.read())


@pytest.fixture
def run_a(tmp_path: Path) -> Iterator[Any]:
    """A run that has saved two steps and waits for a line of input."""
    with start(tmp_path / "saved", 0, "hold") as process:
        wait_until_holding(process)
        yield process
        process.kill()


def lineages(folder: Path) -> set[str | None]:
    store = PortableCheckpointer(str(folder), keep_last=None)
    return {store.lineage(store.path_of(step)) for step in store.steps()}


def test_a_second_run_in_the_directory_is_refused_and_the_first_one_loses_nothing(
    run_a: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distributed.cli import main

    folder = tmp_path / "saved"
    before = {name: os.stat(folder / name).st_ino for name in os.listdir(folder)}
    (lineage,) = lineages(folder)
    # At the same time: the command that removes checkpoints.
    prune: list[int] = []
    thread = threading.Thread(
        target=lambda: prune.append(main(["checkpoint", "prune", str(folder), "--keep-last", "1"]))
    )
    thread.start()
    for words in ((), ("resume",)):
        with start(folder, 1, *words) as second:
            _, errors = second.communicate(timeout=200)
        assert second.returncode != 0
        assert f"checkpoint_dir: another run is writing there: pid {run_a.pid} on " in errors
        assert str(folder) in errors
    thread.join()
    assert prune == [2]
    assert f"PATH: another run is writing there: pid {run_a.pid}" in capsys.readouterr().err
    # Reading needs no lease.
    for words in (("ls",), ("verify",), ("show",)):
        assert main(["checkpoint", *words, str(folder)]) == 0
    assert main(["checkpoint", "prune", str(folder), "--keep-last", "1", "--dry-run"]) == 0
    assert {name: os.stat(folder / name).st_ino for name in os.listdir(folder)} == before
    out, errors = run_a.communicate("go\n", timeout=200)
    assert run_a.returncode == 0, errors
    assert json.loads(out.splitlines()[-1]) == [[1, 2, 3, 4], str(folder / "step_00000004")]
    assert lineages(folder) == {lineage}
    assert not [name for name in os.listdir(folder) if name.startswith(("superseded", ".lease", ".tmp"))]
    with start(folder, 1, "resume") as again:
        again.communicate(timeout=200)
    assert again.returncode == 0


def test_after_sigkill_the_same_directory_is_resumed_at_once(run_a: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_a.kill()
    run_a.wait()
    assert [name for name in os.listdir(folder) if name.startswith(".lease")] == [".lease-00000001"]
    with start(folder, 1, "resume") as second:
        out, errors = second.communicate(timeout=200)
    assert second.returncode == 0, errors
    assert json.loads(out.splitlines()[-1])[0] == [2, 3, 4]  # step 1 was saved
    assert "waiting up to" not in errors
    assert not [name for name in os.listdir(folder) if name.startswith((".lease", ".tmp"))]
