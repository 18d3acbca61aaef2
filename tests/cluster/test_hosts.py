"""Training across hosts that have a network between them, which fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import Trainer
from tests.cluster.hosts import Network, can_have_hosts
from tests.cluster.train import BATCH, EPOCHS, SAMPLES, Tally, tally_step

pytestmark = pytest.mark.needs(can_have_hosts())

SCRIPT = str(Path(__file__).parent / "train.py")
FIXED = ("--num-nodes", "2", "--gpus-per-node", "2", "--rdzv-endpoint", "n0:29500")
ELASTIC = ("--nnodes", "1:2", "--gpus-per-node", "2", "--rdzv-endpoint", "n0:29500", "--max-restarts", "1")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(["n0", "n1"], tmp_path) as network:
        yield network


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The weights of one process that nothing happened to."""
    model = Tally()
    Trainer(
        model,
        training_step=tally_step,
        global_batch_size=BATCH,
        epochs=EPOCHS,
        optimizer=torch.optim.SGD,
        learning_rate=1.0,
        deterministic=True,
        num_processes=1,
        device="cpu",
    ).fit(torch.utils.data.TensorDataset(torch.arange(SAMPLES)))
    return model.state_dict()


class Job:
    """The same command on both hosts, in a folder that they share."""

    def __init__(self, network: Network, folder: Path, *flags: str, **env: str) -> None:
        self.network, self.folder = network, folder
        self.processes = {}
        for number, host in enumerate(network.hosts.values()):
            place = () if "--nnodes" in flags else ("--node-rank", str(number))
            command = [sys.executable, "-m", "distributed.cli", "train", "--script", SCRIPT, *flags, *place]
            with self.log(host.name).open("w") as log:
                self.processes[host.name] = host.start(
                    command,
                    cwd=folder,
                    env={"OMP_NUM_THREADS": "1", **env},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def output(self, name: str) -> str:
        return self.log(name).read_text()

    def ended(self, name: str, seconds: float = 120) -> int:
        return self.processes[name].wait(timeout=seconds)

    def reach(self, step: int) -> None:
        """Wait until rank 0 has done `step`; fails at once when a host ends before."""
        mark = self.folder / f"step_{step}"
        while not mark.exists():
            for name, process in self.processes.items():
                try:
                    process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
                assert mark.exists(), self.output(name)

    def weights(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / f"weights_{name}.pt", weights_only=True)
        return found


def assert_same_training(weights: dict[str, Any], alone: dict[str, Any]) -> None:
    """Every sample was used once an epoch, and what all share is the lone process's."""
    assert set((weights["seen"] * -BATCH).round(decimals=9).tolist()) == {float(EPOCHS)}
    torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)


def seconds_of_silence(output: str, host: str) -> int:
    found = re.search(rf"host {host} \(node \d, ranks [\d, ]+\) sent no heartbeat for (\d+) s", output)
    assert found is not None, output
    return int(found[1])


def test_two_hosts_train_as_one_process_does_and_the_slow_one_is_named(
    network: Network, tmp_path: Path, alone: dict[str, Any]
) -> None:
    job = Job(network, tmp_path, *FIXED, SLOW_HOST="n1", PACE="0.05")
    assert [job.ended("n0"), job.ended("n1")] == [0, 0], job.output("n0") + job.output("n1")
    for host in ("n0", "n1"):  # each holds the trained weights where `fit` was called
        assert_same_training(job.weights(host), alone)
    assert "4 ranks on 2 nodes" in job.output("n0")
    assert re.search(r"rank [23] \(host n1\) spends \d+ .* in forward", job.output("n0")), job.output("n0")


def test_a_cable_is_pulled_and_each_side_names_the_other(network: Network, tmp_path: Path) -> None:
    """Nothing breaks then: the ranks would wait for minutes."""
    job = Job(network, tmp_path, *FIXED, MARK="6", PACE="0.1")
    job.reach(6)
    network["n1"].cut()
    assert [job.ended("n0"), job.ended("n1")] == [1, 1]
    for here, there in (("n0", "n1"), ("n1", "n0")):
        assert 10 <= seconds_of_silence(job.output(here), there) <= 15
    reports = [path.read_text() for path in sorted((tmp_path / "saved").glob("failure_report_*.txt"))]
    assert len(reports) == 2
    assert all("The ranks on this host were in backward of step" in report for report in reports)


def test_a_host_that_loses_power_is_named_and_the_other_goes_on(
    network: Network, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """With the global batch as it was."""
    job = Job(network, tmp_path, *ELASTIC, MARK="6", PACE="0.1")
    job.reach(6)
    network["n1"].die()
    assert job.ended("n0") == 0, job.output("n0")
    assert 10 <= seconds_of_silence(job.output("n0"), "n1") <= 15
    assert "continuing with 2 ranks instead of 4" in job.output("n0")
    assert f"global batch {BATCH} = 3 samples x 2 accumulated x 2 ranks" in job.output("n0")
    assert_same_training(job.weights("n0"), alone)
    (restart,) = json.loads((tmp_path / "history_n0.json").read_text())["restarts"]
    assert restart.startswith("host n1 (node 1, ranks 2, 3) sent no heartbeat")


def test_torchruns_ranks_are_told_too(network: Network, tmp_path: Path) -> None:
    """Their watcher ends them, and torchrun then does what it was told to about failures."""
    processes = []
    for number, host in enumerate(network.hosts.values()):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--node-rank={number}", "--master-addr=n0", "--master-port=29500", SCRIPT]
        with (tmp_path / f"{host.name}.log").open("w") as log:
            env = {"OMP_NUM_THREADS": "1", "MARK": "6", "PACE": "0.1", "WATCHER": "1"}
            options: dict[str, Any] = {"cwd": tmp_path, "env": env, "stderr": subprocess.STDOUT}
            processes.append(host.start(command, stdout=log, **options))
    mark = tmp_path / "step_6"
    while not mark.exists():
        assert processes[0].poll() is None, (tmp_path / "n0.log").read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            processes[0].wait(timeout=0.1)
    network["n1"].cut()
    assert processes[0].wait(timeout=120) == 1
    found = (tmp_path / "n0.log").read_text()
    assert re.search(r"host n1 \(node 1, rank 1\) sent no heartbeat for 1[0-5] s", found), found
