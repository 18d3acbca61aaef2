"""Ray as a user meets it from a shell: its own cluster, one that runs already, one that does not answer."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from distributed_backends.ray import cluster

from distributed.errors import UserError
from tests.support.ports import free_port

pytestmark = pytest.mark.starts_processes

TRAIN = [sys.executable, "-m", "distributed.cli", "train", "--backend", "ray", "--num-processes", "2"]

# Says where it is, then waits in a step for a signal that ends its run.
WAITING = """
import os, pathlib, time
import torch
from distributed import Callback, RayTrainer

class Wait(Callback):
    def on_step_end(self, context):
        pathlib.Path("draft").write_text(str(os.nice(0)))
        pathlib.Path("draft").rename("here")
        time.sleep(600)

x = torch.randn(16, 4)
trainer = RayTrainer(torch.nn.Linear(4, 2), batch_size=4, num_processes=2, callbacks=[Wait()])
trainer.fit((x, (x[:, 0] > 0).long()))
"""


@pytest.fixture
def place() -> Iterator[str]:
    """A folder whose short name is in the command line of every process of a cluster started there."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
        end(folder)


def processes(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(f"{folder}/" in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def workers(folder: str) -> list[psutil.Process]:
    """Those that rename themselves: of them only the environment may still name the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == folder:
                found.append(process)
    return found


def end(folder: str) -> None:
    found = list({*processes(folder), *workers(folder)})
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=10)


def environment(folder: str, **given: str) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder, **given}


def run(command: list[str], cwd: Path, env: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def best_accuracy(output: str) -> float:
    (best,) = {float(value) for value in re.findall(r"best validation accuracy (\S+)", output)}
    return best


def test_the_main_job_on_a_cluster_of_its_own(place: str, tmp_path: Path) -> None:
    output = run([*TRAIN, "--epochs", "15"], tmp_path, environment(place))
    assert "ray (pytorch-ddp): 2 ranks on CPU over gloo" in output
    assert best_accuracy(output) > 0.95
    await_(lambda: not processes(place), 60)  # Ray's agents end when they miss its daemon
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(place: str, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(place), stderr=subprocess.PIPE, text=True
    ) as process:
        await_(lambda: (tmp_path / "here").exists() or process.poll() is not None, 120)
        assert processes(place)
        assert int((tmp_path / "here").read_text()) == os.nice(0), "Ray gives its workers a lower priority"
        process.send_signal(number)
        error = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error or number == signal.SIGKILL, error
    await_(lambda: not processes(place) + workers(place), 60)


def await_(happened: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_cluster_that_runs_already(place: str, tmp_path: Path) -> None:
    """Its own address, and through its client server; there the task and the result travel as bytes."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray's own default gives its workers what other processes leave. With gRPC's support for forks, the
    # processes that its client server starts abort now and then (ray-project/ray#63202).
    env = environment(place, RAY_worker_niceness="0", GRPC_ENABLE_FORK_SUPPORT="0", **token)
    port, client = free_port(), free_port()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=4"]
    options = [f"--ray-client-server-port={client}", "--include-dashboard=false", "--disable-usage-stats"]
    run([*start, *options, f"--temp-dir={place}/head"], tmp_path, env)
    before = {process.pid for process in processes(place)}
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}"):
        try:
            output = run([*TRAIN, "--epochs", "10", "--device", "cpu", "--address", address], tmp_path, env)
        except AssertionError:
            logs = Path(place, "head", "session_latest", "logs").glob("ray_client_server*")
            print(*(f"{log.name}:\n{log.read_text(errors='replace')}" for log in sorted(logs)), sep="\n")
            raise
        assert best_accuracy(output) > 0.95
    # It is not ours to end.
    assert before <= {process.pid for process in processes(place)}


def test_a_client_server_that_cannot_start_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, and what it starts for the client aborts each time, which real processes do by chance."""
    attempts = []

    def abort(**options: object) -> None:
        attempts.append(options["address"])
        raise ConnectionAbortedError("Starting Ray client server failed.")

    monkeypatch.setattr(cluster.ray, "init", abort)
    monkeypatch.setattr(cluster, "_await_answer", lambda address: address)
    monkeypatch.setattr(cluster, "_CLIENT_PATIENCE", 0.01)
    with pytest.raises(UserError, match="GRPC_ENABLE_FORK_SUPPORT=0") as caught:
        cluster._join("ray://head:10001")
    assert caught.value.field == "ray.address"
    assert set(attempts) == {"ray://head:10001"}


def test_an_address_that_does_not_answer(place: str, tmp_path: Path) -> None:
    """Nobody there, and somebody there who is no Ray: said by Ray's own attempts after minutes."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addresses = [f"127.0.0.1:{free_port()}", f"ray://127.0.0.1:{silent.getsockname()[1]}"]
        started = [
            subprocess.Popen(
                [*TRAIN, "--address", address],
                cwd=tmp_path,
                env=environment(place),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for address in addresses
        ]
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    for output, address, reason in zip(outputs, addresses, ("refused", "does not speak gRPC"), strict=True):
        place_tried = address.removeprefix("ray://")
        assert f"ray.address: no Ray cluster answers; tried {place_tried} for 10 s" in output
        assert reason in output
        assert "Traceback" not in output
