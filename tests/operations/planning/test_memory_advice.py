"""An error by lack of memory names the parts of memory, and changes that fit: real failures, real changes."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import UserError, WorkerError
from distributed.config import load, parse_assignments
from distributed.interfaces.plan import Facts, Resources
from distributed.interfaces.task import Task
from distributed.operations.planning import memory_advice
from distributed.operations.planning.apart import call_apart
from distributed.operations.planning.memory_advice import plan_that_ran
from distributed.operations.planning.micro_batch_effects import effect_of_size
from distributed.operations.planning.once_per_host import once_per_host
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.resilience.failure_reports import FailureReport, note_chosen_batch
from distributed.system.host_memory import Room
from tests.support import commands
from tests.support.limited_memory import LimitedData, WideModel
from tests.support.ports import free_port
from tests.support.training import Die, make_trainer

MIB = 1 << 20
FIELDS: dict[str, Any] = {
    "loss_fn": nn.MSELoss(),
    "optimizer": "sgd",
    "max_steps": 2,
    "global_batch_size": 64,
}


class Deep(nn.Module):
    """Blocks whose activations can be computed again, and parameters beside them that can be sharded."""

    def __init__(self, blocks: int = 4, table: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(WideModel(), nn.Linear(1, 16).double()) for _ in range(blocks)
        )
        self.table = nn.Parameter(torch.zeros(table, 8, dtype=torch.float64))
        self.last = nn.Linear(16, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.last(x) + self.table.sum() * 0.0
        return found


def run(model: nn.Module, ranks: int, data: Any, **fields: Any) -> None:
    make_trainer(model, ranks, **{**FIELDS, **fields}).fit(data)


def suggested(message: str) -> list[dict[str, Any]]:
    """The changes that a message proposes, as configuration fields."""
    texts = re.findall(r"\(\d\) ((?:--set \S+ ?)+)", message)
    return [parse_assignments(text.replace("--set", "").split()) for text in texts]


@pytest.mark.starts_processes
def test_the_proposed_changes_fit_where_the_run_did_not() -> None:
    limits = {0: 340 * MIB, 1: 340 * MIB}
    with pytest.raises(WorkerError, match="The rank ran out of memory") as raised:
        run(Deep(table=1 << 18), 2, LimitedData(64, limits), max_steps=1)
    message = raised.value.summary
    predicted = re.search(r"as predicted: (.*?); (\d+) MiB together", message)
    assert predicted is not None
    assert {"parameters", "gradients", "activations"} <= set(re.findall("[a-z]{3,}", predicted[1]))
    assert int(predicted[2]) > 340
    changes = suggested(message)
    # Half of the limit: 16 samples might fit, and an allocator that keeps freed memory might not let them.
    assert changes[0] == {"batch_size": 8, "gradient_accumulation_steps": 4}
    assert any(change.get("activation_checkpointing") == "full" for change in changes)
    assert "mixed_precision" not in message  # it changes the training, and others fit
    for change in changes[:2]:
        run(Deep(table=1 << 18), 2, LimitedData(64, limits), max_steps=1, **change)


@pytest.mark.starts_processes
def test_changes_are_named_where_memory_is_not_predicted() -> None:
    with pytest.raises(WorkerError) as raised:
        run(WideModel(), 2, LimitedData(64, {1: 100 * MIB}), optimizer=partial(torch.optim.Rprop, lr=0.1))
    message = raised.value.summary
    assert "The parts of its memory are not predicted, optimizer: the memory of this optimizer" in message
    assert "not predicted to fit: (1) --set batch_size=16 --set gradient_accumulation_steps=2" in message


@pytest.mark.starts_processes
def test_a_killed_rank_says_how_to_check_for_a_lack_of_memory() -> None:
    with pytest.raises(WorkerError) as raised:
        run(WideModel(), 2, LimitedData(64, {}), callbacks=[Die(step=1, rank=1)])
    assert raised.value.exc_type == "SIGKILL"
    assert "dmesg" in raised.value.summary
    assert "activations 192 MiB" in raised.value.summary
    assert "another sender of the signal" in raised.value.summary  # 192 MiB do not fill a host


def far_too_large(loss: Callable[..., Tensor], output: Tensor, target: Tensor) -> Tensor:
    if not torch._subclasses.fake_tensor.is_fake(output):
        torch.empty(1 << 60)
    return loss(output, target)


@pytest.mark.starts_processes
def test_a_failure_in_this_process_has_a_note() -> None:
    with pytest.raises(RuntimeError) as raised:
        run(WideModel(), 1, LimitedData(64, {}), loss_fn=partial(far_too_large, nn.MSELoss()))
    notes = "\n".join(raised.value.__notes__)
    assert re.search(r"at the peak of a step, as predicted: parameters .*, activations 384 MiB; ", notes)
    assert "--set batch_size=32 --set gradient_accumulation_steps=2 (192 MiB, the same training)" in notes


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError) as raised:
        run(nn.Linear(3, 1).double(), 1, LimitedData(64, {}))
    assert not any("Memory of a rank" in note for note in raised.value.__notes__)


@pytest.mark.starts_processes
def test_batches_of_a_loader_are_changed_in_the_loader() -> None:
    loader = torch.utils.data.DataLoader(LimitedData(64, {}), batch_size=64)
    with pytest.raises(RuntimeError) as raised:
        run(WideModel(), 1, loader, loss_fn=partial(far_too_large, nn.MSELoss()))
    assert "(1) DataLoader(batch_size=32) and --set gradient_accumulation_steps=2" in "\n".join(
        raised.value.__notes__
    )


def test_a_run_does_not_report_the_size_that_an_earlier_one_chose() -> None:
    note_chosen_batch(2, 8)
    with pytest.raises(RuntimeError) as raised:
        run(nn.Linear(3, 1).double(), 1, LimitedData(64, {}))
    assert FailureReport.from_error(raised.value, 0).chosen_batch is None


def test_only_a_run_that_chooses_its_size_is_taken_for_one_that_chose() -> None:
    error = WorkerError("rank 0 ran out", rank=0, host="here", exc_type="MemoryError", chosen_batch=(2, 8))
    fields = {"backend": "pytorch-ddp", "num_processes": 2, "device": "cpu", "global_batch_size": 64}
    for size, expected in ((4, 4), ("auto", 8)):
        config = load(overrides={**fields, "batch_size": size})
        plan = resolve(config, get_catalog(), Facts(), Resources())
        assert plan_that_ran(plan, error, None).batch.batch_size == expected


def accepted(fields: dict[str, Any]) -> bool:
    try:
        resolve(load(overrides=fields), get_catalog(), Facts(), Resources())
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    "parallel",
    [{}, {"pipeline": 2}, {"pipeline": 2, "num_microbatches": 4}, {"pipeline": 2, "num_microbatches": 6}],
    ids=["no pipeline", "pipeline", "four pieces", "six pieces"],
)
def test_the_sizes_that_are_proposed_are_those_that_a_run_accepts(parallel: dict[str, int]) -> None:
    """The oracle: each divisor, as the configuration of a run."""
    fields = {"backend": "pytorch-ddp", "num_processes": 4, "device": "cpu", "parallel": parallel}
    share = 24 if parallel else 12
    fields |= {"global_batch_size": 48}
    plan = resolve(load(overrides={**fields, "batch_size": share}), get_catalog(), Facts(), Resources())
    changes = memory_advice._smaller(memory_advice._Change("", plan), Task(nn.Linear(1, 1)))
    proposed = [parse_assignments(change.text.replace("--set", "").split()) for change in changes]
    sizes = [size for size in range(share - 1, 0, -1) if share % size == 0]
    possible = [{"batch_size": size, "gradient_accumulation_steps": share // size} for size in sizes]
    assert proposed == [change for change in possible if accepted({**fields, **change})]
    assert proposed


# -- what a change of the micro-batch changes besides ------------------------------------


def normed(evaluated: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    return model.eval() if evaluated else model


class Counter(nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1).double()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1.0
        found: Tensor = self.layer(x)
        return found


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    scores = output @ target.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def eleven_classes(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.expand(-1, 11), target[:, 0].long())


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("model", "loss_fn", "effect"),
    [
        (nn.Linear(16, 1).double(), nn.MSELoss(), ""),
        (nn.Linear(16, 1).double(), mean_of, ""),
        (nn.Linear(16, 1).double(), eleven_classes, ""),
        (nn.Linear(16, 1).double(), contrastive, "another training: the loss compares the samples"),
        (normed(), nn.MSELoss(), "another training: '1' (BatchNorm1d)"),
        (normed(evaluated=True), nn.MSELoss(), "another training: '1' (BatchNorm1d)"),
        (Counter(), nn.MSELoss(), "another training: the forward pass changes the buffer 'passes'"),
        (nn.Linear(3, 1).double(), nn.MSELoss(), "not checked whether the training is the same"),
    ],
    ids=["module", "mean", "classes", "pairs", "norm", "evaluated norm", "buffer", "fails"],
)
def test_the_effect_of_another_size_is_that_which_auto_refuses(
    model: nn.Module, loss_fn: Any, effect: str
) -> None:
    task = Task(model=model, loss_fn=loss_fn)
    batch = [torch.zeros(2, 16, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)]
    found = effect_of_size(task, model, batch)
    assert found.startswith(effect)
    assert bool(found) == bool(effect)


def wide_and_normed() -> nn.Module:
    return nn.Sequential(WideModel(), nn.BatchNorm1d(1).double())


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("build", "fields", "note"),
    [
        (wide_and_normed, {}, "another training: '1' (BatchNorm1d) computes statistics"),
        (WideModel, {"loss_fn": contrastive}, "another training: the loss compares the samples"),
    ],
    ids=["norm of a factory", "pairs"],
)
def test_a_change_that_alters_the_training_says_so(build: Any, fields: dict[str, Any], note: str) -> None:
    fields = {"loss_fn": nn.MSELoss(), **fields}
    fields["loss_fn"] = partial(far_too_large, fields["loss_fn"])
    with pytest.raises(RuntimeError) as raised:
        run(build, 1, LimitedData(64, {}), **fields)
    notes = "\n".join(raised.value.__notes__)
    smaller = re.findall(r"--set batch_size=[^;]*?MiB, ([^;]*)", notes)
    assert smaller
    assert all(each.startswith(note) for each in smaller)


# -- an advice that fails, and what the process holds -------------------------------------


def test_an_advice_that_fails_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise ZeroDivisionError("in the advice")

    ended = []
    catalog = get_catalog()
    monkeypatch.setattr(memory_advice, "advice_on", fail)
    monkeypatch.setattr(
        catalog.manager.hook, "on_run_end", lambda **given: ended.append(given["error"]), raising=False
    )
    with pytest.raises(RuntimeError, match="allocate") as raised:
        run(WideModel(), 1, LimitedData(64, {}), loss_fn=partial(far_too_large, nn.MSELoss()))
    assert ended == [raised.value]
    expected = "No change is proposed, because the advice has failed (ZeroDivisionError: in the advice)."
    assert expected in raised.value.__notes__


@pytest.mark.starts_processes
def test_the_model_that_this_process_holds_is_part_of_its_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "distributed.operations.planning.planned_run.host_memory", lambda ranks: Room(100 * MIB, "in a test")
    )
    with pytest.raises(RuntimeError) as raised:
        run(Deep(table=1 << 19), 1, LimitedData(64, {}), loss_fn=partial(far_too_large, nn.MSELoss()))
    # Half of the room and of the 32 MiB of parameters.
    assert "predicted to need at most 66 MiB" in "\n".join(raised.value.__notes__)


# -- ranks of another launcher ------------------------------------------------------------

JOINED = """
import os
from functools import partial
from pathlib import Path

from torch import nn

from tests.operations.planning.test_memory_advice import Deep, far_too_large, run
from tests.support.limited_memory import LimitedData


class Sent(Deep):
    def __setstate__(self, state):
        super().__setstate__(state)
        if "DISTRIBUTED_RUN_DIR" in os.environ:
            Path("sent-" + Path(os.environ["DISTRIBUTED_RUN_DIR"]).name).touch()


run(Sent(), 1, LimitedData(64, {}), loss_fn=partial(far_too_large, nn.MSELoss()), num_processes=None,
    backend="fsdp", launch="auto")
"""


@pytest.mark.starts_processes
def test_ranks_that_were_started_elsewhere_predict_the_model_before_it_was_wrapped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOINED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    base = {name: value for name, value in os.environ.items() if name != "DISTRIBUTED_RUN_DIR"}
    done = commands.run(
        [*torchrun, "--master-port", str(free_port()), str(tmp_path / "train.py")],
        env={**base, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1
    found = re.findall(r"as predicted: parameters .*?, activations .*; (\d+) MiB together", done.stderr)
    assert found, done.stderr
    assert "not predicted" not in done.stderr
    assert len([*tmp_path.glob("sent-*")]) == 1  # one rank of the host has predicted


def test_the_ranks_of_a_host_wait_for_the_one_that_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, asked, done = 4, threading.Semaphore(0), []
    lock = fcntl.flock

    def counted(*given: Any) -> None:
        asked.release()
        lock(*given)

    def work() -> str:
        for _ in range(number):
            asked.acquire()
        done.append(1)
        return "advice"

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", counted)
    with ThreadPoolExecutor(number) as pool:
        found = [*pool.map(lambda _: once_per_host("run", work), range(number))]
    assert (found, done) == (["advice"] * number, [1])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.starts_processes
def test_work_whose_process_was_killed_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """if True:
        import os, signal
        from distributed.operations.planning.once_per_host import once_per_host
        once_per_host("run", lambda: os.kill(os.getpid(), signal.SIGKILL))"""
    killed = commands.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert killed.returncode == -signal.SIGKILL
    assert [*tmp_path.iterdir()] != []
    assert once_per_host("run", lambda: "advice") == "advice"
    assert [*tmp_path.iterdir()] == []


def gpus_seen(_: Task) -> dict[str, Any]:
    return {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "count": torch.cuda.device_count()}


@pytest.mark.starts_processes
def test_the_process_that_predicts_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load(overrides={"backend": "serial", "device": "cpu"})
    plan = replace(resolve(config, get_catalog(), Facts(), Resources()), device="cuda")
    assert call_apart(plan, Task(nn.Linear(1, 1)), gpus_seen) == {"visible": "", "count": 0}


def test_the_capacity_of_a_gpu_is_read_from_the_error_or_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(overrides={"backend": "serial", "device": "cpu"})
    plan = replace(resolve(config, get_catalog(), Facts(), Resources()), device="cuda")
    full = "CUDA out of memory. GPU 0 has a total capacity of 79.25 GiB of which 1.00 GiB is free"
    assert memory_advice._capacity(plan, full, 0) == int(79.25 * (1 << 30))
    # Torch 2.11 on an H200 whose memory another process has a part of.
    shared = (
        "GPU 0 has a total capacity of 139.80 GiB of which 2.27 GiB is free. Including non-PyTorch memory,"
        " this process has 56.71 GiB memory in use. Process 571 has 80.81 GiB memory in use."
    )
    found = memory_advice._capacity(plan, shared, 0)
    assert found == pytest.approx((2.27 + 56.71) * (1 << 30), abs=2)
    nothing = memory_advice._capacity(plan, shared.replace("2.27 GiB", "0 bytes"), 0)
    assert nothing == pytest.approx(56.71 * (1 << 30), abs=2)
    assert memory_advice._capacity(plan, "out of memory", 0) == 1 << 62
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=MIB))
    assert memory_advice._capacity(plan, "out of memory", 0) == MIB
