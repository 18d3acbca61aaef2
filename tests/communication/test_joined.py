"""Ranks that somebody else started, and ranks on several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from distributed import DistributedConfig, UserError
from distributed.communication.environment import detect, expand_nodelist
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from tests.support import commands
from tests.support.ports import free_port

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[01-02]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-1@1",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n1"}


def place(env: Mapping[str, str]) -> tuple[Any, ...] | None:
    found = detect(env)
    return found and (
        found.launcher,
        found.rank,
        found.size,
        found.local_rank,
        found.local_size,
        found.node_rank,
        found.num_nodes,
        found.master_addr,
    )


def test_each_launcher_says_where_a_rank_stands() -> None:
    assert place(TORCHRUN) == ("torchrun", 1, 4, 1, 2, 0, 2, "10.0.0.1")
    assert place(SRUN) == ("srun", 3, 4, 1, 2, 1, 2, "n01")
    assert place(MPIRUN) == ("mpirun", 1, 2, 1, 2, 0, 1, "127.0.0.1")
    assert place({**SRUN, **MPIRUN, **TORCHRUN}) == place(TORCHRUN)
    assert place({**SRUN, **MPIRUN}) == place(MPIRUN)


def test_ranks_of_a_job_compute_one_port_and_jobs_differ() -> None:
    ports = [detect({**SRUN, "SLURM_PROCID": rank}) for rank in "0123"]
    assert len({found.master_port for found in ports if found}) == 1
    other = detect({**SRUN, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert ports[0] is not None
    assert other.master_port != ports[0].master_port


@pytest.mark.parametrize(
    "env", [{}, BATCH, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "2"}]
)
def test_what_does_not_join(env: dict[str, str]) -> None:
    """A batch script carries Slurm's variables without a step, an interactive step has one task."""
    assert detect(env) is None


@pytest.mark.parametrize(
    ("env", "field"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR"),
    ],
)
def test_contradictory_variables_are_refused(env: dict[str, str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        detect(env)
    assert caught.value.field == field


def test_nodelists() -> None:
    assert expand_nodelist("n[1-3,07],login") == ["n1", "n2", "n3", "n07", "login"]
    assert expand_nodelist("r[1-2]n[08-10]") == ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]


def plan(env: Mapping[str, str], **fields: Any) -> Any:
    return resolve(
        DistributedConfig(device="cpu", **fields), get_catalog(), Facts(), Resources(), detect(env)
    )


def test_launch_decides_whether_to_join() -> None:
    assert plan(TORCHRUN).mode == "join"
    assert plan(TORCHRUN, launch="join").world_size == 4
    assert plan(TORCHRUN, launch="spawn", num_gpus=2).mode == "spawn"
    assert plan(TORCHRUN, launch="per-rank", num_gpus=2).mode == "spawn"
    assert plan({}, num_gpus=2).mode == "spawn"
    assert plan({}).mode == "in-process"
    assert plan({}, launch="spawn").mode == "spawn"
    with pytest.raises(UserError, match=r"launch: .* Got 'join'\. .*launch=auto"):
        plan({}, launch="join")
    with pytest.raises(UserError, match=r"num_gpus: .*asks for 2 ranks and torchrun started 4\. Got 2"):
        plan(TORCHRUN, num_gpus=2)


# Real ranks. One script does all: unequal datasets, a fit, a second one, and a failure.

SCRIPT = """
import json, os, sys
import torch
from torch import nn
from distributed import Callback, Trainer, UserError, WorkerError

def data(length):
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(5))
    return x, (x.sum(dim=1) > 0).long()

class Boom(Callback):
    all_ranks = True
    def on_step_end(self, context):
        if context.world.rank == 1 and context.progress.step == BAD_STEP:
            raise ZeroDivisionError("only here")

BAD_STEP = 8
options = json.loads(os.environ["OPTIONS"])
said = {}
names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
rank = next((os.environ[name] for name in names if name in os.environ), None)
if rank is not None:
    try:
        Trainer(nn.Linear(4, 2)).fit(data(20 + int(rank)))
    except UserError as error:
        said["unequal"] = str(error)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
trainer = Trainer(model, batch_size=4, learning_rate=0.1, callbacks=[Boom()], device="cpu", **options)
history = trainer.fit(data(20), data(7), epochs=1)
said["losses"], said["world"] = history.steps["loss"], history.world_size
history = trainer.fit(data(20), data(7), epochs=1)
said["again"], said["best"] = history.steps["step"], history.best_accuracy
said["weights"] = [value.hex() for p in model.parameters() for value in p.flatten().tolist()]
said["buffers"] = [value.hex() for b in model.buffers() for value in b.double().flatten().tolist()]
other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
Trainer(other, batch_size=4, learning_rate=0.1, device="cpu", **options).fit(data(20), epochs=1)
said["unvalidated"] = [value.hex() for b in other.buffers() for value in b.double().flatten().tolist()]
# One write: what ranks print to one pipe in pieces may run together.
os.write(1, ("SAID " + json.dumps(said) + chr(10)).encode())
trainer.fit(data(20), epochs=1)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("joined") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def together(
    words: list[list[str]], envs: list[dict[str, str]], options: list[dict[str, Any]], fresh: bool = False
) -> list[Any]:
    """Run the commands side by side: (exit code, stdout, stderr) of each."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        commands.start(
            command,
            env={**base, **env, "OPTIONS": json.dumps(option)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            fresh=fresh,
        )
        for command, env, option in zip(words, envs, options, strict=True)
    ]
    outputs = commands.finish(running, timeout=120, code=None)
    return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]


def said(output: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("SAID ")[2]) for line in output.splitlines() if "SAID " in line]


def check_equal_ranks(reports: list[dict[str, Any]], joined: bool = True) -> dict[str, Any]:
    assert len(reports) == 2
    for report in reports:
        if joined:
            assert (
                "train_loader: the ranks hold different datasets: rank 1 has 21 samples, rank 0 has 20"
                in (report["unequal"])
            )
        assert report["world"] == 2
        assert report["again"] == [4, 5, 6]
        assert report["best"] is not None
    assert reports[0]["weights"] == reports[1]["weights"]
    assert reports[0]["losses"] == reports[1]["losses"]
    # BatchNorm statistics without a validation, which would make them equal.
    assert reports[0]["unvalidated"] == reports[1]["unvalidated"]
    return reports[0]


@pytest.fixture(scope="module")
def under_torchrun(script: str) -> tuple[dict[str, Any], str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master-port",
        str(free_port()),
        script,
    ]
    ((code, out, err),) = together([command], [{}], [{}], fresh=True)
    assert code == 1, err
    return check_equal_ranks(said(out)), err


@pytest.mark.starts_processes
def test_torchrun(under_torchrun: tuple[dict[str, Any], str]) -> None:
    """Both ranks fit, fit again; then rank 1 raises, and rank 0 says that it did."""
    err = under_torchrun[1]
    assert "WorkerError: rank 1 (" in err
    assert "raised ZeroDivisionError: only here" in err


@pytest.mark.starts_processes
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_other_launchers_train_alike(
    launcher: str, script: str, under_torchrun: tuple[dict[str, Any], str]
) -> None:
    port = {"MASTER_PORT": str(free_port())}
    if launcher == "srun":
        shared = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "n1",
            **port,
        }
        envs = [{**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    else:
        envs = [
            {**MPIRUN, **port, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
            for rank in "01"
        ]
    first, second = together([[sys.executable, script]] * 2, envs, [{}, {}])
    report = check_equal_ranks([*said(first[1]), *said(second[1])])
    assert report["weights"] == under_torchrun[0]["weights"]
    assert (first[0], second[0]) == (1, 1)
    assert "WorkerError: rank 1 (" in first[2]
    assert "ZeroDivisionError: only here" in second[2]
    assert "WorkerError" not in second[2]


@pytest.mark.starts_processes
def test_two_nodes_each_get_the_whole_result(script: str, under_torchrun: tuple[dict[str, Any], str]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = [
        {"num_gpus": 2, "num_nodes": 2, "node_rank": node, "rdzv_endpoint": endpoint} for node in (0, 1)
    ]
    nodes = together([[sys.executable, script]] * 2, [{}, {}], options)
    reports = [report for node in nodes for report in said(node[1])]
    report = check_equal_ranks(reports, joined=False)
    assert report["weights"] == under_torchrun[0]["weights"]
    assert reports[0]["buffers"] == reports[1]["buffers"]
    for code, _, err in nodes:
        assert code == 1
        assert "rank 1 (" in err
        assert "raised ZeroDivisionError: only here" in err
