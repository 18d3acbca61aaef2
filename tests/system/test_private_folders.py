"""Private folders that a killed process leaves behind: which the next start removes, and which never."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distributed.checkpoint.export import export_safetensors
from distributed.system.private_folders import OWNER, add_owner, sweep
from tests.support import commands
from tests.support.needs import needs_root
from tests.support.ports import free_port
from tests.support.training import make_trainer

TRAIN = """
import os, sys, threading, torch
from distributed import Callback, Trainer

class Stay(Callback):
    all_ranks = True
    def __init__(self, pipe):
        self.pipe = pipe
    def on_step_end(self, context):
        with open(self.pipe, "w") as file:
            file.write(f"{os.getpid()}\\n")
        threading.Event().wait()

if __name__ == "__main__":
    ranks = {} if "RANK" in os.environ else {"num_processes": 2}
    data = torch.ones(200_000, 4), torch.zeros(200_000, dtype=torch.long)
    trainer = Trainer(
        torch.nn.Linear(4, 2), device="cpu", tracking={"progress": "off"}, batch_size=8, max_steps=1,
        callbacks=[Stay(path) for path in sys.argv[1:]], **ranks,
    )
    trainer.fit(data)
    for thread in threading.enumerate():
        if thread.name == "sweep-private-folders":
            thread.join()
"""
"""With a pipe as argument, each rank writes its pid there after a step, and stays."""


def folders(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("distributed-*"))


def start(script: Path, launched: bool, *args: str) -> list[Any]:
    """The process that calls `fit`; of ranks that a launcher started, both."""
    env = {**os.environ, "TMPDIR": str(script.parent)}
    port = str(free_port())
    ranks = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in "01"
    ]  # fmt: skip
    command = [sys.executable, str(script), *args]
    return [
        commands.start(command, env=env | own, cwd=script.parent) for own in (ranks if launched else [{}])
    ]


def monitors(ranks: set[int]) -> set[int]:
    """Processes beside ranks that a launcher started."""
    return {child.pid for rank in ranks for child in psutil.Process(rank).children()}


@pytest.mark.starts_processes
@pytest.mark.parametrize("launched", [False, True])
def test_the_next_start_removes_what_a_killed_run_left(launched: bool, tmp_path: Path) -> None:
    script, pipe = tmp_path / "train.py", tmp_path / "pipe"
    script.write_text(TRAIN)
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR)) as reached:
        started = start(script, launched, str(pipe))
        ranks = {int(reached.readline()) for _ in range(2)}
    (left,) = folders(tmp_path)
    # All at once: a stopped process does not see another one end.
    pids = {*(process.pid for process in started), *ranks, *monitors(ranks)}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    for process in started:
        process.wait(20)
    assert folders(tmp_path) == [left]
    assert launched or (tmp_path / left / "task.bin").stat().st_size > 4_000_000
    for process in start(script, launched):
        assert process.wait(100) == 0
    assert folders(tmp_path) == []


def left_by(place: Path, name: str, *owners: dict[str, Any]) -> Path:
    """A folder as a killed process leaves it: this process's mark, with other values in it."""
    folder = place / name
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "file").write_bytes(b"data")
    for number, other in enumerate(owners):
        add_owner(folder)
        (own,) = folder.glob(f"{OWNER}{os.getpid()}")
        content = {**json.loads(own.read_text()), **other}
        own.rename(folder / f"{OWNER}{number}")
        (folder / f"{OWNER}{number}").write_text(json.dumps(content))
    return folder


def test_a_folder_is_removed_only_if_all_of_its_owners_are_proven_to_have_ended(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, mine = {"pid": ended.pid}, {}
    reused = {"start": 1}  # this pid, and a process that was started before
    gone = [left_by(tmp_path, f"distributed-gone-{n}", *o) for n, o in enumerate([[dead], [reused, dead]])]
    kept = [
        left_by(tmp_path, "distributed-alive", mine),
        left_by(tmp_path, "distributed-one-alive", dead, mine),
        left_by(tmp_path, "distributed-without-owner"),
        left_by(tmp_path, "other-prefix", dead),
        left_by(tmp_path, "distributed-other-boot", {**dead, "boot": "another"}),
        left_by(tmp_path, "distributed-other-container", {**dead, "namespaces": [1, 2]}),
        left_by(tmp_path, "distributed-no-pid", {"pid": -1}),
        left_by(tmp_path, "distributed-text", {"pid": "1"}),
    ]
    odd = left_by(tmp_path, "distributed-pipe")
    os.mkfifo(odd / f"{OWNER}1")
    listed = left_by(tmp_path, "distributed-list")
    (listed / f"{OWNER}1").write_text("[]")
    (tmp_path / "distributed-file").write_text("")
    (tmp_path / "distributed-link").symlink_to(left_by(tmp_path, "linked", dead))
    (gone[0] / "data" / "link").symlink_to(kept[0])
    sweep(tmp_path, "distributed-")
    assert [folder.exists() for folder in gone] == [False, False]
    assert all((folder / "data" / "file").exists() for folder in [*kept, odd, listed, tmp_path / "linked"])
    sweep(tmp_path / "missing", "distributed-")


@pytest.mark.needs(needs_root("a folder of another user"))
def test_another_users_folder_stays(tmp_path: Path) -> None:
    folder = left_by(tmp_path, "distributed-foreign", {"pid": 2**22 + 1})
    os.chown(folder, 12345, -1)
    sweep(tmp_path, "distributed-")
    assert folder.exists()
    os.chown(folder, os.geteuid(), -1)
    sweep(tmp_path, "distributed-")
    assert not folder.exists()


def test_an_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    trainer = make_trainer(torch.nn.Linear(4, 2), folder=tmp_path / "saved", batch_size=4)
    history = trainer.fit((torch.ones(4, 4), torch.zeros(4, dtype=torch.long)), max_steps=1)
    left = left_by(tmp_path / "out", ".tmp-export-1", {"pid": 2**22 + 1})
    other = left_by(tmp_path / "out", ".tmp-export-2", {})
    export_safetensors(history.checkpoint or "", str(tmp_path / "out"))
    assert not left.exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [other.name, "model.safetensors"]
