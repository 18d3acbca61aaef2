"""Ranks that horovodrun, torchrun or nobody started: real processes, the code that Horovod's users write."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed import UserError
from distributed.communication.environment import detect
from tests.support.ports import free_port

pytestmark = pytest.mark.starts_processes

HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "-np", "2"]
RANK_1_OF_4 = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "54788",
}

# What a user of Horovod has, the trainer put in.
SCRIPT = """
import json, os, pathlib, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distributed import Callback, HorovodTrainer, UserError

if "--init" in sys.argv:
    import horovod.torch as hvd
    hvd.init()
rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0")))

class Kill(Callback):
    all_ranks = True
    def on_step_end(self, context):
        if context.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long()), batch_size=4, shuffle=True)
torch.manual_seed(rank)
model = nn.Linear(4, 2)
said = {"rank": rank}
if "--init" in sys.argv:
    other = nn.Linear(4, 2)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
    try:
        HorovodTrainer(other, optimizer=wrapped).fit(loader, epochs=1)
    except UserError as error:
        said["wrapped"] = str(error)
    torch.manual_seed(rank)
    other = nn.Linear(4, 2)
    stepper = HorovodTrainer(other, optimizer="sgd", learning_rate=0.1)
    for _ in range(3):
        stepper.train_step(x[: 4 + rank], (x[: 4 + rank].sum(dim=1) > 0).long())
    said["stepped"] = other.weight.flatten().tolist()
trainer = HorovodTrainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loss_fn=nn.CrossEntropyLoss(),
    verbose=rank == 0,
    **json.loads(os.environ["OPTIONS"]),
)
if "--kill" in sys.argv:
    trainer.callbacks = [Kill()]
history = trainer.fit(loader, epochs=2)
history = trainer.fit(loader, epochs=2)
said["world"], said["steps"] = history.world_size, history.steps["step"][-1]
said["weights"] = [value for p in model.parameters() for value in p.flatten().tolist()]
try:
    said["mean"] = trainer.metric_average(torch.tensor(float(rank)), name="rank")
except UserError as error:
    said["mean"] = str(error)
pathlib.Path(os.environ["SAID"], f"{rank}.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("horovodrun") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*command: str, code: int = 0, cwd: Path | None = None, **variables: str) -> str:
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**base, **variables},
    )
    assert (done.returncode != 0) == (code != 0), done.stdout
    return done.stdout


def reports_of(
    folder: Path, *command: str, code: int = 0, **options: Any
) -> tuple[str, list[dict[str, Any]]]:
    """(output, what each rank of `SCRIPT` had to say, in rank order)."""
    output = run(*command, code=code, OPTIONS=json.dumps(options), SAID=str(folder))
    return output, [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.fixture(scope="module")
def under_horovodrun(script: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return reports_of(tmp_path_factory.mktemp("said"), *HOROVODRUN, sys.executable, script, "--init")[1]


def test_a_script_under_horovodrun(under_horovodrun: list[dict[str, Any]]) -> None:
    """Both ranks fit twice from rank 0's weights, end with the same, and average a figure."""
    first, second = under_horovodrun
    assert first["world"] == second["world"] == 2
    assert first["steps"] == 20
    assert first["weights"] == second["weights"]
    assert first["mean"] == second["mean"] == 0.5
    assert first["stepped"] == second["stepped"]
    assert "optimizer: the optimizer is wrapped by Horovod already" in first["wrapped"]


@pytest.mark.parametrize(
    ("way", "backend"),
    [("torchrun", "horovod"), ("plain", "horovod"), ("horovodrun", "horovod"), ("horovodrun", "pytorch-ddp")],
)
def test_other_ways_train_alike(
    way: str, backend: str, script: str, under_horovodrun: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Here the script leaves it to the trainer to start Horovod."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master-port"]
    starter = {
        "torchrun": [*torchrun, str(free_port())],
        "plain": [sys.executable],
        "horovodrun": HOROVODRUN,
    }[way]
    python = [sys.executable] if way == "horovodrun" else []
    output, reports = reports_of(tmp_path, *starter, *python, script, backend=backend, num_processes=2)
    assert f"{backend}: 2 ranks on CPU" in output
    assert len(reports) == (1 if way == "plain" else 2)
    for report in reports:
        assert report["world"] == 2
        assert report["weights"] == pytest.approx(under_horovodrun[0]["weights"], abs=1e-6)
        if backend == "horovod":
            assert report["mean"] == (0.0 if way == "plain" else 0.5)
        else:
            assert "Horovod has not started" in report["mean"]


def test_a_rank_killed_under_horovodrun_is_named(script: str, tmp_path: Path) -> None:
    output, reports = reports_of(tmp_path, *HOROVODRUN, sys.executable, script, "--kill", code=1)
    assert re.search(r"Process name: 1\b", output), output
    assert reports == []


def test_the_main_job_under_horovodrun(tmp_path: Path) -> None:
    """The bundled digits, from the command line, pass 95 %."""
    ours = [sys.executable, "-m", "distributed.cli", "train", "--backend", "horovod", "--epochs", "15"]
    output = run(*HOROVODRUN, *ours, "--checkpoint-dir", "saved", cwd=tmp_path)
    assert "horovod: 2 ranks on CPU over gloo" in output
    (best,) = {float(value) for value in re.findall(r"best validation accuracy (\S+)", output)}
    assert best > 0.95
    # Its checkpoint goes on without Horovod, under one process.
    more = run(
        *ours[:4], "--backend", "serial", "--epochs", "16", "--global-batch-size", "64", "--batch-size", "64",
        "--checkpoint-dir", "saved", "--resume", cwd=tmp_path,
    )  # fmt: skip
    assert "continues at epoch 15" in more


def test_horovodruns_variables_are_read() -> None:
    found = detect(RANK_1_OF_4)
    assert found is not None
    place = (found.launcher, found.rank, found.size, found.local_rank, found.local_size)
    assert place == ("horovodrun", 3, 4, 1, 2)
    assert (found.node_rank, found.num_nodes, found.master_addr) == (1, 2, "10.0.0.1")
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert detect({**RANK_1_OF_4, **torchrun}) == detect(torchrun)
    with pytest.raises(UserError, match="HOROVOD_LOCAL_RANK"):
        detect({**RANK_1_OF_4, "HOROVOD_LOCAL_RANK": "one"})


@pytest.mark.parametrize(
    ("left_over", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE=1, HOROVOD_SIZE=4"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "RANK=1, HOROVOD_RANK=3"),
    ],
)
def test_two_launchers_that_contradict_each_other_are_refused(left_over: dict[str, str], said: str) -> None:
    """torch's ranks and Horovod's would wait for each other for ever."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match=said):
        detect({**RANK_1_OF_4, **left_over, **meeting})
    started_by_us = {**RANK_1_OF_4, **left_over, **meeting, "DISTRIBUTED_RUN_DIR": "/run"}
    assert detect(started_by_us) == detect({**left_over, **meeting, "DISTRIBUTED_RUN_DIR": "/run"})


FUNCTION = """
import json, os, pathlib, sys
import horovod

def train():
    import torch
    from distributed import HorovodTrainer
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    trainer = HorovodTrainer(torch.nn.Linear(4, 2), optimizer="sgd", learning_rate=0.1, batch_size=4)
    history = trainer.fit((x, (x.sum(dim=1) > 0).long()), epochs=4)
    return history.world_size, trainer.model.weight.flatten().tolist()

if __name__ == "__main__":
    print(json.dumps(horovod.run(train, np=2)))
"""


def test_horovod_run_starts_a_function_that_fits(tmp_path: Path) -> None:
    """`horovod.run`: the function's ranks are joined, and its results come back."""
    script = tmp_path / "run.py"
    script.write_text(FUNCTION)
    (line,) = [line for line in run(sys.executable, str(script)).splitlines() if line.startswith("[[")]
    first, second = json.loads(line)
    assert first[0] == 2
    assert first == second
