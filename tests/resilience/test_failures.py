"""Ranks that raise, exit, or are killed: who is named, and that nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from stat import S_IMODE
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, UserError, WorkerError
from distributed.interfaces.callback import Context
from distributed.system.addresses import loopback_interface
from distributed.testing.rank_pool import RankPool
from tests.support import commands
from tests.support.processes import children, started_since
from tests.support.training import OnStep, make_trainer

pytestmark = pytest.mark.starts_processes

HOST = os.uname().nodename


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private folders go; empty again when the test is over. Its path is short, because that of a Unix
    socket has at most 107 characters."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    gc.collect()  # a trainer keeps its state's folder for the next fit, and so does an uncollected one
    left = [p.name for p in folder.iterdir() if p.name.startswith("distributed-")]
    assert [name for name in left if not name.startswith("distributed-pool-")] == []


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Sample `bad` raises."""

    def __init__(self, length: int = 16, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise FileNotFoundError(f"image {index} is gone")
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Fails(nn.Module):
    """Its forward calls `act` where the rank's samples are the later ones."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 2), act

    def forward(self, x: Tensor) -> Tensor:
        if int(os.environ["RANK"]) == 1:
            self.act()
        result: Tensor = self.layer(x)
        return result


def fit(
    model: Any,
    dataset: Dataset[Any] | None = None,
    callback: Callback | None = None,
    pool: Any = None,
    num_workers: int = 0,
    **given: Any,
) -> WorkerError:
    """The error of a run on two ranks, none of which is left."""
    before = children()
    made = make_trainer(model, 2, pool, callbacks=[callback] if callback else [], **given)
    loader = DataLoader(
        dataset or Samples(), batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    with pytest.raises(WorkerError) as caught:
        made.fit(loader)
    if pool is None:
        assert started_since(before) == set()
    return caught.value


def boom() -> None:
    raise ZeroDivisionError("deep in the model")


def test_an_exception_in_the_model() -> None:
    error = fit(Fails(boom))
    assert (error.rank, error.host, error.exc_type) == (1, HOST, "ZeroDivisionError")
    assert f"rank 1 ({HOST}, pid " in str(error)
    assert 'in boom\n    raise ZeroDivisionError("deep in the model")' in error.worker_traceback


def test_an_exception_in_a_loader_worker() -> None:
    # Of 16 samples in global batches of 8, sample 5 is rank 1's.
    error = fit(nn.Linear(4, 2), Samples(bad=5), num_workers=1)
    assert error.rank == 1
    assert "image 5 is gone" in error.worker_traceback
    assert "DataLoader worker process 0" in error.worker_traceback


def test_an_exception_in_a_callback() -> None:
    def act(context: Context) -> None:
        raise KeyError("no such figure")

    error = fit(nn.Linear(4, 2), callback=OnStep(act, step=2, rank=0))
    assert (error.rank, error.exc_type) == (0, "KeyError")
    assert "no such figure" in error.worker_traceback


def test_a_rank_that_exits() -> None:
    error = fit(Fails(lambda: sys.exit(3)))
    assert error.rank == 1
    assert "called sys.exit(3)" in str(error)


def test_a_users_mistake_on_one_rank() -> None:
    def act() -> None:
        raise UserError("too large", field="data.width", got=9, allowed="1 to 8", remedy="Choose 8")

    trainer = make_trainer(Fails(act), 2, batch_size=4)
    with pytest.raises(UserError) as caught:
        trainer.fit(Samples())
    error = caught.value
    assert (error.field, error.got, error.allowed, error.remedy) == ("data.width", 9, "1 to 8", "Choose 8")


def test_a_pool_survives_a_failed_run(rank_pool: RankPool) -> None:
    assert fit(Fails(boom), pool=rank_pool).exc_type == "ZeroDivisionError"
    good = make_trainer(nn.Linear(4, 2), 2, rank_pool, batch_size=4)
    assert good.fit(Samples()).num_samples == 16


@pytest.mark.parametrize("all_ranks", [True, False])
def test_a_pool_keeps_ranks_that_all_refuse_a_run(rank_pool: RankPool, all_ranks: bool) -> None:
    """And no others: one that refuses alone leaves the rest in a collective."""

    def act(context: Context) -> None:
        if all_ranks or context.world.rank == 0:
            raise UserError("too large", field="data.width")

    def mean_pid(callback: Callback | None = None) -> float:
        trainer = make_trainer(nn.Linear(4, 2), 2, rank_pool, batch_size=4)
        trainer.callbacks = [callback] if callback else []
        trainer.metrics = {"pid": lambda outputs, targets: (torch.tensor(float(os.getpid())), 1)}
        return float(trainer.fit(Samples(), Samples(), epochs=1).epochs[-1]["val_pid"])

    before = mean_pid()
    with pytest.raises(UserError, match="too large"):
        mean_pid(OnStep(act))
    assert (mean_pid() == before) == all_ranks


def test_a_pool_ends_ranks_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.testing.rank_pool._IDLE", 0.0)

    before, alive = children(), []
    with closing(RankPool()) as pool:
        for num_ranks in (2, 3):
            make_trainer(nn.Linear(4, 2), num_ranks, pool, batch_size=4).fit(Samples())
            alive.append(started_since(before))
    assert len(alive[0]) >= 2
    assert alive[0].isdisjoint(alive[1])


# Kills. `Endless` trains until it is stopped; a rank says through a pipe that it is at work.


class Endless(Callback):
    all_ranks = True

    def __init__(self, pipe: str) -> None:
        self.pipe = pipe

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == 3:
            Path(self.pipe + str(context.world.rank)).write_text(str(os.getpid()))


def pipes(folder: Path) -> str:
    for rank in range(2):
        os.mkfifo(folder / f"at-work-{rank}")
    return str(folder / "at-work-")


def await_ranks(pipe: str) -> list[psutil.Process]:
    """Both ranks' processes, once both have trained three steps."""
    return [psutil.Process(int(Path(pipe + str(rank)).read_text())) for rank in range(2)]


def families(*processes: psutil.Process) -> list[psutil.Process]:
    return [p for process in processes for p in (process, *process.children(recursive=True))]


def listening(*processes: psutil.Process) -> set[tuple[str, int]]:
    """(address, port) of every socket they listen on."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def check_private(folder: Path, ranks: list[psutil.Process], before: set[tuple[str, int]]) -> None:
    """The task is this user's alone, and nothing listens but on loopback."""
    (run,) = (p for p in folder.iterdir() if p.name.startswith("distributed-"))
    assert S_IMODE(run.stat().st_mode) == 0o700
    assert {S_IMODE(p.stat().st_mode) for p in run.iterdir()} == {0o600}
    assert {"task.bin", "sys_path.json"} <= {p.name for p in run.iterdir()}
    # Other tests' libraries may listen in this process.
    opened = listening(psutil.Process(), *ranks) - before
    assert {address for address, _ in opened} == {"127.0.0.1"}
    # Where gloo would listen otherwise depends on what this host's name resolves to.
    assert {rank.environ()["GLOO_SOCKET_IFNAME"] for rank in ranks} == {loopback_interface()}


@pytest.mark.real_start
def test_a_killed_rank_is_named_without_a_timeout(tmp_path: Path, scratch: Path) -> None:
    """The death ends the run: a run that waited for the collective's timeout would exceed the test's own."""
    pipe, seen, killed = pipes(tmp_path), [], []
    before = listening(psutil.Process())

    def kill() -> None:
        ranks = await_ranks(pipe)
        seen.extend(families(*ranks))
        try:
            check_private(scratch, ranks, before)
        finally:
            killed.append(ranks[1].pid)
            ranks[1].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    settings: dict[str, Any] = {"epochs": 10**6, "launch_start": "fresh", "collective_timeout": 3600.0}
    error = fit(nn.Linear(4, 2), callback=Endless(pipe), num_workers=1, **settings)
    killer.join()
    assert (error.rank, error.exc_type) == (1, "SIGKILL")
    assert f"rank 1 ({HOST}, pid {killed[0]}) was terminated by SIGKILL" in str(error)
    assert len(seen) >= 4  # two ranks and a loader worker of each
    assert not psutil.wait_procs(seen, timeout=5)[1]  # a loader worker is reaped by init, in its own time


def hear_interrupts() -> None:
    """A shell starts what it puts into the background deaf to Ctrl-C, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPT = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader
from distributed import Callback, Trainer

class Endless(Callback):
    all_ranks = True
    def on_step_end(self, context):
        if context.progress.step == 3:
            Path(os.environ["AT_WORK"] + str(context.world.rank)).write_text(str(os.getpid()))

x, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.long)
samples = torch.utils.data.TensorDataset(x, y)
# Persistent: else there is a moment between epochs without a worker.
loader = DataLoader(samples, batch_size=4, num_workers=1, persistent_workers=True)
Trainer(nn.Linear(4, 2), epochs=10**6, callbacks=[Endless()]).fit(loader)
"""


@pytest.mark.real_start
@pytest.mark.parametrize("victim", ["rank", "SIGINT", "SIGTERM", "SIGKILL"])
def test_the_command_line_leaves_nothing_behind(victim: str, tmp_path: Path) -> None:
    pipe = pipes(tmp_path)
    (tmp_path / "endless.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "distributed.cli",
        "train",
        "--script",
        str(tmp_path / "endless.py"),
        "--num-processes",
        "2",
        "--device",
        "cpu",
    ]
    env = {**os.environ, "AT_WORK": pipe, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    ) as train:
        ranks = await_ranks(pipe)
        everybody = families(*ranks, *psutil.Process(train.pid).children())
        assert {rank.ppid() for rank in ranks} < {process.pid for process in everybody}  # forks of a starter
        assert len(everybody) >= 5
        if victim == "rank":
            ranks[0].send_signal(signal.SIGKILL)
        else:
            train.send_signal(getattr(signal, victim))
        _, err = train.communicate(timeout=20)
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert alive == []
    if victim == "rank":
        assert train.returncode == 1
        assert f"rank 0 ({HOST}, pid {ranks[0].pid}) was terminated by SIGKILL" in err
    elif victim == "SIGINT":
        assert train.returncode == 130
        assert err.rstrip().endswith("interrupted")
    else:
        assert train.returncode == -getattr(signal, victim)


def test_a_script_on_every_rank_ends_with_its_parent(tmp_path: Path) -> None:
    pipe = pipes(tmp_path)
    (tmp_path / "beside.py").write_text("here = True\n")
    (tmp_path / "plain.py").write_text(
        "import os, signal, sys, beside\nassert sys.argv[1:] == ['--x'] and __name__ == '__main__'\n"
        f"open({pipe!r} + os.environ['RANK'], 'w').write(str(os.getpid()))\nsignal.pause()\n"
    )
    command = [
        sys.executable,
        "-m",
        "distributed.cli",
        "train",
        "--script",
        str(tmp_path / "plain.py"),
        "--launch",
        "per-rank",
        "--num-processes",
        "2",
        "--device",
        "cpu",
        "--",
        "--x",
    ]
    with commands.start(command) as train:
        ranks = await_ranks(pipe)
        train.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
