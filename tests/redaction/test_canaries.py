"""Secrets that a run is given stand in nothing that it writes or prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import commands

pytestmark = pytest.mark.starts_processes

CANARIES = [f"Zcanary{number}q" for number in range(8)]
SCRIPT = """
import logging, os, sys
import torch
from distributed import Trainer

class Fails(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == int(os.environ["FAILS_AT"]):
            logging.getLogger("distributed").warning("no answer from https://bob:%s@host/x", "Zcanary6q")
            raise ConnectionError("cannot reach postgresql://bob:Zcanary7q@db:5432/runs")
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 2

loader = torch.utils.data.DataLoader(Fails(), batch_size=2)
Trainer(torch.nn.Linear(4, 2)).fit(loader)
"""


def run(folder: Path, *words: str, fails_at: int = -1) -> tuple[int, str]:
    """Exit status and output of the program, called with secrets in its environment."""
    env = {
        **os.environ,
        "FAILS_AT": str(fails_at),
        "PGPASSWORD": CANARIES[0],
        "MLFLOW_TRACKING_PASSWORD": CANARIES[1],
        "TMPDIR": str(folder / "tmp"),
    }
    done = commands.run(
        [sys.executable, "-m", "distributed.cli", *words],
        env=env,
        cwd=folder,
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def leaks(folder: Path) -> list[str]:
    """Canaries in files below `folder`, its script left out."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "train.py"]
    assert any(path.name == "manifest.json" for path in files)
    return [f"{path}: {c}" for path in files for c in CANARIES if c.encode() in path.read_bytes()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def words(folder: Path, ranks: int, *more: str) -> list[str]:
    uri = f"sqlite:///file:{folder}/mlflow.db?uri=true&password={CANARIES[2]}&token={CANARIES[3]}"
    return [
        *("train", "--script", "train.py", "--num-processes", str(ranks), "--device", "cpu"),
        *("--checkpoint-dir", "ckpt", "--epochs", "2", *more),
        *("--set", "mlflow_tracking=true", "--set", f"tracking.mlflow_tracking_uri={uri}"),
        *("--", "--password", CANARIES[4], f"https://me:{CANARIES[5]}@host/data"),
    ]


def test_a_run_and_what_reads_it(folder: Path) -> None:
    status, output = run(folder, *words(folder, 1))
    assert status == 0, output
    outputs = [output]
    for reading in (
        ["checkpoint", "show", "ckpt"],
        ["checkpoint", "show", "ckpt", "--json"],
        ["runs", "."],
        ["report", "ckpt", "--output", "report.html"],
    ):
        status, output = run(folder, *reading)
        assert status == 0, output
        outputs.append(output)
    assert [c for c in CANARIES for text in outputs if c in text] == []
    assert leaks(folder) == []


def test_a_rank_that_fails(folder: Path) -> None:
    """The second epoch raises an error with an address in it."""
    run(folder, *words(folder, 2))
    status, output = run(folder, *words(folder, 2, "--resume", "--epochs", "4"), fails_at=5)
    assert status != 0
    assert "cannot reach postgresql://***@db:5432/runs" in output
    assert [c for c in CANARIES if c in output] == []
    assert leaks(folder) == []
