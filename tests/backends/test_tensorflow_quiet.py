"""What TensorFlow says of the machine is kept back; nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.starts_processes, pytest.mark.real_start]

SCRIPT = """
import os, sys
from distributed_backends.tensorflow.import_tensorflow import quiet_stderr
with quiet_stderr():
    os.write(2, b"I0000 00:00:1795184254.499336    7876 port.cc:153] oneDNN custom operations are on.\\n")
    os.write(2, b"E0000 00:00:1795184254.499336    7876 x.cc:1] disk on fire\\n")
    print("a warning of Python's", file=sys.stderr)
try:
    with quiet_stderr():
        os.write(2, b"why it failed\\n")
        raise ImportError("no TensorFlow")
except ImportError:
    pass
print("afterwards", file=sys.stderr)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run([sys.executable, *command], text=True, capture_output=True, env=env, check=True)


def test_chatter_goes_and_the_rest_stays() -> None:
    said = run("-c", SCRIPT).stderr.splitlines()
    assert said == [
        "E0000 00:00:1795184254.499336    7876 x.cc:1] disk on fire",
        "a warning of Python's",
        "why it failed",
        "afterwards",
    ]


def test_a_run_shows_its_own_lines_alone() -> None:
    train = ["-m", "distributed.cli", "train", "--backend", "tensorflow", "--num-processes", "2"]
    done = run(*train, "--max-steps", "2")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert [line for line in lines if "] " in line or "absl" in line] == []
    assert any(line.startswith("best validation accuracy") for line in lines)
