"""Ranks that are forks of one process train as fresh ones do, or are fresh ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FITS = """
import json, os, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Callback, DistributedConfig, Trainer

class Parents(Callback):
    all_ranks = True
    def on_run_start(self, context):
        with open(f"parents-{name}", "a") as file:
            file.write(f"{os.getppid()} {torch.get_num_threads()} {os.environ.get('TORCH_LOGS')}\\n")

def fit(given, **config):
    global name
    name = given
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    data = TensorDataset(torch.rand(24, 4), torch.randint(0, 2, (24,)))
    config = DistributedConfig(num_processes=2, batch_size=3, deterministic=True, device="cpu", **config)
    trainer = Trainer(model=model, config=config, callbacks=[Parents()])
    trainer.fit(data)
    return [parameter.flatten().tolist() for parameter in model.parameters()]

if __name__ == "__main__":
    weights = [fit("first"), fit("second"), fit("fresh", launch_start="fresh")]
    os.environ["TORCH_LOGS"] = "-inductor"  # torch reads it at import
    weights += [fit("changed", launch_start="warm"), fit("renewed", launch_start="warm")]
    with open("weights.json", "w") as file:
        json.dump(weights, file)
    sys.path.insert(0, os.path.abspath("shadows"))
    fit("shadowed", launch_start="warm")
"""


@pytest.mark.real_start
def test_ranks_are_forks_that_train_as_fresh_ranks_or_fresh_ones(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text(FITS)
    (tmp_path / "shadows").mkdir()
    (tmp_path / "shadows/ipaddress.py").write_text("from no_such_module import nothing\n")
    words = ["train", "--script", "fits.py", "--num-processes", "2", "--max-steps", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "distributed.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    # Only a fresh rank imports the file that takes the place of a module of the standard library.
    assert "No module named 'no_such_module'" in done.stderr
    first, *others = json.loads((tmp_path / "weights.json").read_text())
    assert others == [first] * 4
    refusals = [line for line in done.stderr.splitlines() if "is started as a fresh process" in line]
    assert [line.partition("process: ")[2] for line in refusals] == [
        *["the environment variable TORCH_LOGS differs from when the modules were imported"] * 2,
        *[f"{tmp_path}/shadows/ipaddress.py would be imported instead of the imported module"] * 2,
    ]
    found = {
        path.name.partition("-")[2]: [line.split() for line in path.read_text().splitlines()]
        for path in tmp_path.glob("parents-*")
    }
    assert {name: len(lines) for name, lines in found.items()} == dict.fromkeys(found, 2)
    assert {line[1] for lines in found.values() for line in lines} == {"2"}
    parents = {name: {line[0] for line in lines} for name, lines in found.items()}
    assert parents["first"] == parents["second"] != parents["fresh"]
    assert parents["changed"] == parents["fresh"]
    assert len(parents["renewed"] | parents["first"] | parents["fresh"]) == 3
    assert {line[2] for line in found["renewed"]} == {"-inductor"}
