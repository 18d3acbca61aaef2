"""A directory that refuses fsync, as some network and user-space file systems do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import verify
from tests.support import commands

# The kernel answers every fsync of this process and its children with EINVAL (seccomp).
SCRIPT = """
import ctypes, json, struct, sys

import torch
from distributed import Trainer

libc = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refuse_fsync():
    number = {"x86_64": 74, "aarch64": 82}[__import__("platform").machine()]
    code = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number of the system call
    code += struct.pack("HBBI", 0x15, 0, 1, number)  # fsync, or else skip one
    code += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 22)  # return EINVAL
    code += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow
    program = Program(len(code) // 8, code)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


refuse_fsync()
torch.manual_seed(0)
trainer = Trainer(
    torch.nn.Linear(4, 2), num_processes=1, device="cpu", global_batch_size=4, checkpoint_dir=sys.argv[1],
    tracking={"progress": "off"}, max_steps=5, checkpoint={"every_n_steps": 1, "keep_last": None},
)
x = torch.randn(64, 4)
history = trainer.fit((x, (x[:, 0] > 0).long()))
print(json.dumps(history.steps["step"]))
"""


@pytest.mark.starts_processes
def test_a_run_saves_where_fsync_is_refused_and_reports_it_once(tmp_path: Path) -> None:
    home = tmp_path / "saved"
    ended = commands.run([sys.executable, "-c", SCRIPT, str(home)], capture_output=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [1, 2, 3, 4, 5]
    (line,) = [line for line in ended.stderr.splitlines() if "fsync" in line]
    assert str(home) in line
    assert "not saved" not in ended.stderr
    store = PortableCheckpointer(str(home), keep_last=None)
    assert [step for step in store.steps() if not verify(store.path_of(step))] == [5, 4, 3, 2, 1]


def test_what_refuses_fsync_is_marked_and_other_errors_are_raised(tmp_path: Path) -> None:
    """A directory of /proc and a pipe: both refuse with EINVAL."""
    files = FileLayer()
    files.fsync_directory(str(tmp_path))
    assert not files.unsynced
    files.fsync_directory("/proc/self")
    assert files.unsynced
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "wb") as pipe:
        files = FileLayer()
        files.fsync(pipe)
        assert files.unsynced
    with pytest.raises(OSError, match="Bad file descriptor"):
        files._sync(write)  # closed
