"""Runs that lose ranks and hosts, get others, and end as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Callback, DistributedConfig, Trainer, UserError, WorkerError
from distributed.interfaces.callback import Context
from distributed.interfaces.plan import BatchPlan, Facts, Resources, RunPlan
from distributed.planner.batch import rescale_batch
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.resilience.elastic import SingleHost
from tests.support.ports import free_port

SAMPLES, BATCH = 240, 12


class Tally(nn.Module):
    """A weight for each sample, which SGD moves by 1 / BATCH whenever the sample is used; and some
    that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.shared = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.seen[index] + torch.sin(index[:, None] / SAMPLES * self.shared).mean(1)


def tally_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss: Tensor = model(batch[0]).mean()
    return loss


class Die(Callback):
    """Kills its rank at the given steps; a step taken again kills again `times` times."""

    all_ranks = True

    def __init__(self, folder: Path, points: dict[int, int], times: int = 1) -> None:
        self.folder, self.points, self.times = folder, points, times

    def on_step_end(self, context: Context) -> None:
        step, rank = context.progress.step, context.world.rank
        marks = [self.folder / f"died_{step}_{time}" for time in range(self.times)]
        if self.points.get(step) == rank and (left := [mark for mark in marks if not mark.exists()]):
            left[0].touch()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(model: nn.Module, folder: Path, **given: Any) -> Trainer:
    options: dict[str, Any] = {
        "num_processes": 2,
        "global_batch_size": BATCH,
        "batch_size": 6,
        "epochs": 2,
        "optimizer": torch.optim.SGD,
        "learning_rate": 1.0,
        "deterministic": True,
        "device": "cpu",
        "checkpoint_dir": str(folder / "saved"),
        "checkpoint": {"every_n_steps": 4},
    }
    return Trainer(model, training_step=tally_step, **(options | given))


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES))


def check_samples(model: Tally, epochs: int = 2) -> None:
    """Each sample was used once an epoch: none lost, none repeated."""
    expected = torch.full((SAMPLES,), -epochs / BATCH, dtype=torch.float64)
    torch.testing.assert_close(model.seen.detach(), expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tally:
    """What a run of two ranks ends with when nothing happens."""
    model = Tally()
    trainer(model, tmp_path_factory.mktemp("whole")).fit(data())
    check_samples(model)
    return model


@pytest.mark.starts_processes
@pytest.mark.parametrize("backend", ["pytorch-ddp", "horovod"])
def test_killed_ranks_are_started_again_and_the_bits_are_the_same(
    backend: str, whole: Tally, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first checkpoint (an older run's is there, and is not taken for it), in an epoch, and
    in the next."""
    saved = tmp_path / "saved"
    trainer(Tally(), tmp_path, num_processes=1, batch_size=12, epochs=1).fit(data())
    model = Tally()
    dies = Die(tmp_path, {3: 1, 18: 0, 30: 1})
    history = trainer(model, tmp_path, backend=backend, callbacks=[dies], elastic={"max_restarts": 3}).fit(
        data()
    )
    check_samples(model)
    if backend == "pytorch-ddp":
        assert torch.equal(model.shared, whole.shared)
    torch.testing.assert_close(model.shared, whole.shared, rtol=0, atol=1e-12)
    assert len(history.restarts) == 3
    assert all("was terminated by SIGKILL" in reason for reason in history.restarts)
    out = capfd.readouterr().out
    assert "restart 3 of 3" in out
    assert "continuing with 2 ranks from the beginning" in out
    # Which one depends on how far the thread that writes had come.
    assert re.search(rf"continuing with 2 ranks from {saved}/step_\d{{8}}; global batch 12 = ", out)


@pytest.mark.starts_processes
def test_restarts_run_out(tmp_path: Path) -> None:
    dies = Die(tmp_path, {3: 1}, times=9)
    with pytest.raises(WorkerError, match=r"rank 1 .* was terminated by SIGKILL"):
        trainer(Tally(), tmp_path, callbacks=[dies], elastic={"max_restarts": 1}).fit(data())
    assert len(list(tmp_path.glob("died_*"))) == 2


@pytest.mark.starts_processes
def test_a_rank_that_keeps_failing_is_done_without(
    whole: Tally, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice at one place: its device, perhaps. Two ranks go on with the same global batch."""
    model = Tally()
    made = trainer(
        model,
        tmp_path,
        num_processes=3,
        batch_size=4,
        callbacks=[Die(tmp_path, {6: 2}, times=9)],
        elastic={"min_ranks": 2},
    )
    history = made.fit(data())
    check_samples(model)
    torch.testing.assert_close(model.shared, whole.shared, rtol=0, atol=1e-12)
    assert history.batch == {
        "batch_size": 3,
        "gradient_accumulation_steps": 2,
        "data_parallel_size": 2,
        "global_batch_size": 12,
    }
    assert "continuing with 2 ranks instead of 3 from" in capfd.readouterr().out


# -- hosts -----------------------------------------------------------------------------

# One host of several, with a rank: argv is the folder, the port and the report to write. Its rank ends it,
# by SIGKILL or SIGTERM, at the world sizes that FATE names.
HOST = """
import json, os, select, signal, sys
sys.path.insert(0, os.environ["TESTS"])
from pathlib import Path
from distributed import Callback
from test_elastic import Tally, data, trainer

folder, port, report = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
FATE = {4: (3, "SIGKILL"), 3: (2, "SIGTERM")}

class Fate(Callback):
    all_ranks = True
    def on_run_start(self, context):
        self.first = None  # also in a resumed run, which has the attributes of the one before
    def on_step_end(self, context):
        step, size, rank = context.progress.step, context.world.size, context.world.rank
        self.first = self.first or step
        mark = folder / f"fate_{size}"
        if size in FATE and not mark.exists() and step == self.first + 5 and rank == FATE[size][0]:
            mark.touch()
            os.kill(int(os.environ["STARTED_BY"]), getattr(signal, FATE[size][1]))
        if size == 2:
            if rank == 0 and step == self.first + 3:
                (folder / "two").write_text("two ranks are at work")
            select.select([], [], [], 0.25)  # others are to come before the end

if __name__ == "__main__":
    os.environ["STARTED_BY"] = str(os.getpid())
    model = Tally()
    history = trainer(
        model, folder, num_processes=4, num_nodes=4, batch_size=3, epochs=6, callbacks=[Fate()],
        rdzv_endpoint=f"127.0.0.1:{port}", elastic={"min_ranks": 2, "last_call": 1.0, "max_restarts": 6},
    ).fit(data())
    weights = model.seen.tolist(), model.shared.tolist()
    report.write_text(json.dumps([history.world_size, history.restarts, *weights]))
"""


def wait_until_served(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def two_are_left(two: int, hosts: list[Any]) -> bool:
    """Wait until two ranks say that they are at work; False when a third host ended before."""
    ends = {os.pidfd_open(host.pid) for host in hosts}
    ready: set[int] = set()
    try:
        while two not in ready and len(ends) >= 2:
            ready = set(wait([two, *ends], 280))
            if not ready:
                return False
            for ended in ready & ends:
                os.close(ended)
            ends -= ready
    finally:
        for end in ends:
            os.close(end)
    return two in ready


@pytest.mark.starts_processes
@pytest.mark.real_start
@pytest.mark.timeout(600)
def test_four_hosts_three_two_and_four_again(tmp_path: Path) -> None:
    """One host is killed, one is told to go and exits with 75, two new ones come: all in one run, whose
    end is that of a run of one rank, with every sample used as often as there are epochs."""
    script, port = tmp_path / "host.py", free_port()
    script.write_text(HOST)
    env = {**os.environ, "TESTS": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    os.mkfifo(tmp_path / "two")
    two = os.open(tmp_path / "two", os.O_RDONLY | os.O_NONBLOCK)

    def start(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(port), str(tmp_path / f"report_{number}")],
            env=env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    # The first serves the meeting, and has rank 0, which nobody ends: ranks follow the process ids.
    hosts = [start(0)]
    try:
        wait_until_served(port)
        hosts += [start(number) for number in (1, 2, 3)]
        assert two_are_left(two, hosts), [(host.kill(), host.communicate()[0]) for host in hosts]
        hosts += [start(number) for number in (4, 5)]
        out = [host.communicate(timeout=280)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
        os.close(two)
    codes = sorted(host.returncode for host in hosts)
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0, 75], "\n".join(out)
    first = next(text for host, text in zip(hosts, out, strict=True) if host.returncode == 0)
    for words in ("with 3 ranks instead of 4", "with 2 ranks instead of 3", "with 4 ranks instead of 2"):
        assert words in first
    assert any("SIGTERM: step" in text for text in out)
    alone = Tally()
    trainer(alone, tmp_path / "alone", num_processes=1, batch_size=12, epochs=6).fit(data())
    reports = sorted(tmp_path.glob("report_*"))
    assert len(reports) == 4
    for report in reports:
        size, _, seen, shared = json.loads(report.read_text())
        assert size == 4
        assert seen == pytest.approx(alone.seen.tolist(), abs=1e-12)
        assert shared == pytest.approx(alone.shared.tolist(), abs=1e-12)
    check_samples(alone, epochs=6)


# -- what can be told before -----------------------------------------------------------


def plan(**given: Any) -> RunPlan:
    options = {"device": "cpu", "checkpoint_dir": "x", "batch_size": 4, "num_processes": 6}
    return resolve(DistributedConfig(**(options | given)), get_catalog(), Facts(), Resources())


def test_one_host_goes_on_with_any_number_that_keeps_the_batch() -> None:
    assert plan(elastic={"min_ranks": 1}).counts == (6, 4, 3, 2, 1)
    assert plan(elastic={"max_restarts": 1}).counts == (6,)
    assert plan(num_nodes=3, rdzv_endpoint="h:1", elastic={"min_nodes": 1}).counts == (6, 4, 2)
    assert plan().counts == ()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: plan(elastic={"min_ranks": 5}),
            "cannot continue with 5 ranks: 5 ranks cannot have equal shares",
        ),
        (
            lambda: plan(num_nodes=6, rdzv_endpoint="h:1", elastic={"min_nodes": 5}),
            "elastic.min_ranks: the run cannot continue with 5 ranks.*Allowed: 6",
        ),
        (
            lambda: plan(num_nodes=3, rdzv_endpoint="h:1", elastic={"min_ranks": 3}),
            "cannot continue with 3 ranks: each host has 2 of them",
        ),
        (lambda: plan(elastic={"min_ranks": 7}), "above the 6 ranks"),
        (lambda: plan(elastic={"max_ranks": 8}), "max_ranks=8 and num_gpus=6 disagree"),
        (lambda: plan(elastic={"min_ranks": 1, "min_nodes": 1}), "set the same limit"),
        (lambda: plan(elastic={"min_nodes": 2}), "min_nodes=2 is above num_nodes=1"),
        (lambda: plan(checkpoint_dir=None, elastic={"max_restarts": 1}), "elastic needs checkpoint_dir"),
        (lambda: plan(num_nodes=2, elastic={"min_nodes": 1}), "rdzv_endpoint missing"),
        (
            lambda: plan(backend="serial", num_processes=1, elastic={"max_restarts": 1}),
            "only the launcher that started the ranks can restart them.*backend 'serial'",
        ),
        (lambda: plan(elastic={"max_restart": 1}), "Did you mean 'elastic.max_restarts'?"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_the_global_batch_stays_and_no_rank_holds_more() -> None:
    whole = BatchPlan(8, 1, 6)
    for ranks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48):
        found = rescale_batch(whole, ranks)
        assert found.global_batch_size == 48
        assert found.data_parallel_size == ranks
        assert found.batch_size <= 8
    assert rescale_batch(whole, 4) == BatchPlan(6, 2, 4)


def test_only_the_same_failure_twice_takes_a_rank_away() -> None:
    def failed(rank: int) -> WorkerError:
        return WorkerError("gone", rank=rank, host="h", exc_type="SIGKILL")

    alone = SingleHost([4, 2])
    for rank, checkpoint in ((1, None), (2, None), (2, "step_1"), (1, "step_1")):
        alone.note_failure(failed(rank), checkpoint)
    assert alone.meet().local_size == 4
    alone.note_failure(failed(1), "step_1")
    assert alone.meet().local_size == 2
    for _ in range(3):
        alone.note_failure(failed(0), "step_1")
    assert alone.meet().local_size == 2
