"""A search whose process is killed, and that is started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import commands

pytestmark = pytest.mark.starts_processes

# Trials 1 and 2 stand in their second epoch until the file `go` is there.
SEARCH = """
import os, pathlib, sys, time
import torch
from distributed import Callback, DistributedTuner, Trainer

class Note(Callback):
    def __init__(self, number):
        self.number = number

    def on_step_end(self, context):
        while self.number >= 1 and context.progress.epoch == 1 and not pathlib.Path("go").exists():
            time.sleep(0.05)

    def on_epoch_end(self, context, metrics):
        with open("epochs.log", "a") as log:
            log.write(f"{self.number} {metrics['epoch']} {os.getpid()}\\n")

x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()

def train(config):
    model = torch.nn.Linear(4, 2)
    options = {"backend": "serial", "batch_size": 8, "learning_rate": config["learning_rate"]}
    Trainer(model, options, callbacks=[Note(config["n"])]).fit((x, y), (x, y), epochs=3)

tuner = DistributedTuner(
    train,
    {"n": {"grid": [0, 1, 2, 3]}, "learning_rate": {"loguniform": [1e-3, 1e-1]}},
    num_cpus=2,
    output_dir="search",
    resume="resume" in sys.argv,
    mlflow="kept",
)
print("best", tuner.tune(num_samples=1)["n"])
print("trials", sorted(trial.parameters["n"] for trial in tuner.results), {t.status for t in tuner.results})
"""


def start(tmp_path: Path, *words: str) -> Any:
    (tmp_path / "search.py").write_text(SEARCH)
    # No pipe that a process of Ray's could keep open.
    log = (tmp_path / f"{'_'.join(['log', *words])}.txt").open("w")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = (sys.executable, "search.py", *words)
    return commands.start(words, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT)


def epochs(tmp_path: Path) -> Counter[tuple[int, int]]:
    path = tmp_path / "epochs.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


@pytest.mark.timeout(600)
def test_a_killed_search_goes_on_with_all_its_trials_and_none_twice(tmp_path: Path) -> None:
    first = start(tmp_path)
    wanted = {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)}
    deadline = time.monotonic() + 240
    try:
        while set(epochs(tmp_path)) != wanted or not _reported(tmp_path, 3):
            assert first.poll() is None, (tmp_path / "log.txt").read_text()
            assert time.monotonic() < deadline, (epochs(tmp_path), (tmp_path / "log.txt").read_text())
            time.sleep(0.1)
    finally:
        family = psutil.Process(first.pid).children(recursive=True)
        trials = [process for process in family if process.pid in _pids_under_way(tmp_path)]
        first.send_signal(signal.SIGKILL)
        first.wait()
        _, alive = psutil.wait_procs(trials, timeout=20)
        for process in family:  # Ray's own agents take minutes; a search's trials end with it
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert len(trials) == 2
    assert alive == []
    before = {trial["name"]: trial["parameters"] for trial in _records(tmp_path)}
    (tmp_path / "go").touch()
    assert start(tmp_path, "resume").wait(timeout=240) == 0, (tmp_path / "log_resume.txt").read_text()
    said = (tmp_path / "log_resume.txt").read_text()
    assert "trials [0, 1, 2, 3] {'finished'}" in said
    # Trials that were under way went on after the epoch that was saved.
    assert epochs(tmp_path) == Counter({(n, epoch): 1 for n in range(4) for epoch in range(3)})
    after = {trial["name"]: trial for trial in _records(tmp_path)}
    assert {name: after[name]["parameters"] for name in before} == before
    assert all([r["epoch"] for r in trial["reports"]] == [0, 1, 2] for trial in after.values())
    _check_mlflow(tmp_path)


def _pids_under_way(tmp_path: Path) -> set[int]:
    """Processes of trials 1 and 2: a trial on one rank trains in its own."""
    lines = [line.split() for line in (tmp_path / "epochs.log").read_text().splitlines()]
    return {int(pid) for number, _, pid in lines if number in ("1", "2")}


def _records(tmp_path: Path) -> list[dict[str, object]]:
    found = sorted((tmp_path / "search" / "trials").glob("*/trial.json"))
    return [json.loads(path.read_text()) for path in found]


def _reported(tmp_path: Path, trials: int) -> bool:
    """Whether so many trials have recorded an epoch, which they do once it is saved."""
    return sum(bool(trial["reports"]) for trial in _records(tmp_path)) == trials


def _check_mlflow(tmp_path: Path) -> None:
    """One run for the search and one for each trial, however often it was started."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("kept")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    names = Counter(run.info.run_name for run in runs)
    assert names == Counter(["search", *(f"{n:05d}" for n in range(4))])
    assert {run.info.status for run in runs} == {"FINISHED"}
