"""Ranks that somebody else started, and ranks on several nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed import DistributedConfig, UserError
from distributed.joined import detect, expand_nodelist
from distributed.plan import Facts, Resources, resolve
from distributed.plugin_manager import get_catalog
from distributed.rendezvous import Rendezvous, await_ranks, listen, open_store

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


def test_the_waiting_names_the_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.rendezvous._REMIND", 0.05)
    store = dist.HashStore()
    store.set("here/2", "host")
    with pytest.raises(UserError, match=r"ranks 1, 3 of 4 did not come within \d+ s"):
        await_ranks(store, 0, 4, 0.2)
    assert "waiting for rank 1, 3 of 4" in capsys.readouterr().out
    late = threading.Thread(target=lambda: [store.set(f"here/{rank}", "host") for rank in (3, 1)])
    late.start()
    await_ranks(store, 0, 4, 60.0)
    late.join()


def test_a_rank_without_a_rendezvous_says_where_it_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.rendezvous._REMIND", 0.05)
    joined = detect({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    assert joined is not None
    with pytest.raises(
        UserError, match=f"MASTER_ADDR: rank 1 cannot reach .*{joined.master_port}.*Check that rank 0"
    ):
        open_store(joined, 1, 4, timedelta(seconds=0.4))
    assert f"rank 1 waits for the rendezvous at 127.0.0.1:{joined.master_port}" in capsys.readouterr().out


def test_a_store_named_by_loopback_listens_there_alone() -> None:
    for host in ("127.0.0.1", "localhost"):
        with Rendezvous(host, 0, 1) as meeting:
            client = dist.TCPStore("127.0.0.1", meeting.port, is_master=False, timeout=timedelta(seconds=5))
            client.set("key", "value")
            assert meeting.store.get("key") == b"value"
            outward = Path("/proc/net/tcp").read_text()
            assert f"00000000:{meeting.port:04X}" not in outward
            assert f"0100007F:{meeting.port:04X}" in outward


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
# One write: what ranks print to one pipe in pieces may run together.
os.write(1, ("SAID " + json.dumps(said) + chr(10)).encode())
trainer.fit(data(20), epochs=1)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("joined") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def together(
    commands: list[list[str]], envs: list[dict[str, str]], options: list[dict[str, Any]]
) -> list[Any]:
    """Run the commands side by side: (exit code, stdout, stderr) of each."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        subprocess.Popen(
            command,
            env={**base, **env, "OPTIONS": json.dumps(option)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command, env, option in zip(commands, envs, options, strict=True)
    ]
    outputs: list[Any] = [None] * len(running)

    def read(index: int) -> None:
        outputs[index] = running[index].communicate(timeout=120)

    readers = [threading.Thread(target=read, args=(index,)) for index in range(len(running))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
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
    ((code, out, err),) = together([command], [{}], [{}])
    assert code == 1, err
    return check_equal_ranks(said(out)), err


def test_torchrun(under_torchrun: tuple[dict[str, Any], str]) -> None:
    """Both ranks fit, fit again; then rank 1 raises, and rank 0 says that it did."""
    err = under_torchrun[1]
    assert "WorkerError: rank 1 (" in err
    assert "raised ZeroDivisionError: only here" in err


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


def test_a_run_that_does_not_leave_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a rank that comes again before all were there wait: nobody has called on it yet."""
    monkeypatch.setattr("distributed.rendezvous._meetings", repeat(0))
    monkeypatch.setattr("distributed.rendezvous._stores", {})
    with Rendezvous("127.0.0.1", 0, 2) as meeting:
        place = {**TORCHRUN, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port)}
        joined = detect(place)
        first = open_store(joined, 1, 2, timedelta(seconds=5))
        with pytest.raises(UserError, match="ranks 0 of 2 did not come"):
            await_ranks(first, 1, 2, 0.1)
        again = open_store(joined, 1, 2, timedelta(seconds=5))
        again.set("here/0", "host")
        await_ranks(again, 1, 2, 5.0)
        with pytest.raises(UserError, match=f"MASTER_ADDR: rank 1 finds an earlier run .*{meeting.port}"):
            open_store(joined, 1, 2, timedelta(seconds=0.3))
        assert "rank 1 waits for an earlier run to leave 127.0.0.1" in capsys.readouterr().out
        # torch's agents let ranks meet again in one store.
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        open_store(joined, 1, 2, timedelta(seconds=5))


def test_node_0_on_another_host_than_the_address_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.rendezvous._REMIND", 0.1)
    monkeypatch.setattr("distributed.rendezvous._PATIENCE", 0.3)
    meeting = Rendezvous("203.0.113.1", 0, 2)  # an address for documents
    with pytest.raises(UserError, match=r"rdzv_endpoint: node 0 has to run where.*Start node rank 0 on"):
        meeting.__enter__()
    listen("127.0.0.1", meeting.port).close()


# Two runs, one after the other; the first one's rank 0 has something left to do when it ends.
TWICE = """
import atexit, json, os, time
import torch
from torch import nn
from distributed import Callback, Trainer

def upload():
    while not os.path.exists("uploaded"):
        time.sleep(0.05)

class Upload(Callback):
    def on_run_start(self, context):
        atexit.register(upload)

data = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
options = json.loads(os.environ["OPTIONS"])
for callbacks in ([Upload()], []):
    trainer = Trainer(nn.Linear(4, 2), batch_size=2, device="cpu", callbacks=callbacks, **options)
    print("TRAINED", trainer.fit(data, epochs=1).world_size, flush=True)
"""


def test_a_second_run_waits_for_the_first_one_to_leave(tmp_path: Path) -> None:
    """On node 1 the first is over while node 0 still serves its store."""
    (tmp_path / "twice.py").write_text(TWICE)
    shared: dict[str, Any] = {"num_gpus": 2, "num_nodes": 2, "collective_timeout": 20}
    shared["rdzv_endpoint"] = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "twice.py"],
            env={**os.environ, "OPTIONS": json.dumps({**shared, "node_rank": node})},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in (0, 1)
    ]
    try:
        assert nodes[1].stdout is not None
        until = f"rank 1 waits for an earlier run to leave {shared['rdzv_endpoint']}"
        heard = []
        while (line := nodes[1].stdout.readline()) and until not in line:
            heard.append(line)
        assert until in line, "".join(heard)
        (tmp_path / "uploaded").touch()
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
        assert outputs[1].count("TRAINED 2") == 1
    finally:
        (tmp_path / "uploaded").touch()
        for node in nodes:
            node.kill()


@pytest.mark.parametrize("where", ["rdzv_endpoint", "MASTER_PORT"])
def test_a_port_in_use(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from distributed import Trainer

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        given: dict[str, Any] = {}
        if where == "rdzv_endpoint":
            given = {"num_gpus": 2, "num_nodes": 2, "node_rank": 0, "rdzv_endpoint": f"127.0.0.1:{port}"}
        else:
            env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for name, value in env.items():
                monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match=f"{where}: .*[Aa]ddress already in use.*{port}.*Choose another"
        ) as caught:
            Trainer(nn.Linear(1, 1), device="cpu", batch_size=1, **given).fit([(0, 0), (1, 1)])
        assert caught.value.field == where
