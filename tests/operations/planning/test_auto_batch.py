"""``batch_size=auto``: the largest micro-batch that fits, and the same training (C1, C2).

Memory is limited by the kernel in the ranks (RLIMIT_DATA), so that allocations really fail.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer
from distributed.data import Source
from distributed.errors import UserError, WorkerError
from distributed.interfaces.backend import Backend
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.launch import run
from distributed.operations.planning import auto_batch
from distributed.operations.planning.apart import first_of
from distributed.operations.planning.auto_batch import choose_before_run
from distributed.testing.rank_pool import RankPool
from tests.operations.planning.auto_batch_tasks import (
    MIB,
    WHOLE,
    Drawing,
    everything,
    failed_rank,
    in_this_process,
    plan_of,
    same,
    task_of,
    wide_model,
)
from tests.support.limited_memory import LimitedData, WideModel
from tests.support.training import Die, make_trainer


def plain_weights(
    data: LimitedData,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    whole: int = WHOLE,
    build: Callable[[], nn.Module] | None = None,
) -> list[Tensor]:
    """The oracle: plain PyTorch, one process, each global batch at once."""
    model = (build or wide_model)()
    stepper = optimizer(model.parameters(), lr=0.1)
    for start in range(0, len(data), whole):
        rows = [data[index] for index in range(start, min(start + whole, len(data)))]
        inputs, targets = (torch.stack(part) for part in zip(*rows, strict=True))
        stepper.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        stepper.step()
    return [p.detach() for p in model.parameters()]


def trainer_of(model: nn.Module, ranks: int, backend: str, **fields: Any) -> Trainer:
    given = {"batch_size": "auto", "global_batch_size": WHOLE, "learning_rate": 0.1, "optimizer": "sgd"}
    given |= {"data": {"shuffle": False}, "loss_fn": nn.MSELoss(), **fields}
    return make_trainer(model, ranks, backend=backend, **given)


def farthest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("backend", "ranks", "limits", "optimizer", "expected"),
    [
        # Predicted: 6 MiB a sample. Rank 1 alone is short of memory, and both ranks take its size.
        ("pytorch-ddp", 2, {1: 180 * MIB}, torch.optim.SGD, 16),
        # Not predicted: 32 runs out of memory on real ranks, and half of it does not.
        ("fsdp", 2, {0: 180 * MIB, 1: 180 * MIB}, torch.optim.RMSprop, 16),
        ("serial", 1, {0: 180 * MIB}, torch.optim.SGD, 16),
    ],
    ids=["pytorch-ddp", "fsdp", "serial"],
)
def test_training_is_that_of_the_whole_batch_and_of_the_size_set_by_hand(
    backend: str,
    ranks: int,
    limits: dict[int, int],
    optimizer: type[torch.optim.Optimizer],
    expected: int,
    rank_pool: RankPool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = LimitedData(WHOLE + 24, limits)  # the last global batch is smaller
    made: Any = "sgd" if optimizer is torch.optim.SGD else partial(optimizer, lr=0.1)
    rate = {"learning_rate": 0.1} if made == "sgd" else {}
    chosen, by_hand = wide_model(), wide_model()
    trainer = trainer_of(chosen, ranks, backend, optimizer=made)
    trainer.fit(data)
    assert trainer.history is not None
    assert trainer.history.batch == {
        "batch_size": expected,
        "gradient_accumulation_steps": WHOLE // ranks // expected,
        "data_parallel_size": ranks,
        "global_batch_size": WHOLE,
    }
    printed = capsys.readouterr().out
    assert f"note: batch_size=auto: {expected} " in printed
    assert ("out of memory with 32" in printed) == (optimizer is not torch.optim.SGD)
    given = {"batch_size": expected, "optimizer": made, **rate}
    trainer_of(by_hand, ranks, backend, pool=rank_pool, **given).fit(LimitedData(len(data), {}))
    assert all(map(torch.equal, chosen.parameters(), by_hand.parameters()))
    assert farthest([*chosen.parameters()], plain_weights(data, optimizer)) < 1e-9


def test_a_resumed_run_keeps_the_size_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, uninterrupted, resumed = LimitedData(WHOLE * 4, {}), wide_model(), wide_model()
    fields = {"folder": tmp_path, "deterministic": True, "checkpoint": {"every_n_steps": 1}}
    trainer_of(uninterrupted, 1, "serial", batch_size=8, deterministic=True).fit(data)
    trainer_of(resumed, 1, "serial", max_steps=2, batch_size=8, **fields).fit(data)
    # There is memory for 64 samples now, and other micro-batches would round differently.
    trainer = trainer_of(wide_model(), 1, "serial", resume_from_checkpoint=True, **fields)
    trainer.fit(data)
    assert "batch_size=auto: 8, as in the checkpoint" in capsys.readouterr().out
    assert all(map(torch.equal, trainer.model.parameters(), uninterrupted.parameters()))


def two_stages() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(WideModel(), nn.Linear(1, 16).double(), WideModel())


@pytest.mark.starts_processes
def test_stages_of_a_pipeline_have_the_size_that_fits_into_the_largest(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data, model = LimitedData(WHOLE, {0: 260 * MIB, 1: 260 * MIB}), two_stages()
    parallel = {"pipeline": 2, "stages": ["0", "2"]}
    trainer_of(model, 2, "pytorch-ddp", parallel=parallel).fit(data)
    printed = capfd.readouterr().out
    assert "MiB predicted of" in printed
    assert "global batch 64 = 64 samples" not in printed
    assert farthest([*model.parameters()], plain_weights(data, build=two_stages)) < 1e-9


@pytest.mark.starts_processes
def test_fewer_ranks_choose_again_and_train_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, model = LimitedData(24, {}), wide_model()
    elastic = {"min_ranks": 2, "max_restarts": 2}
    fields = {"folder": tmp_path, "elastic": elastic, "callbacks": [Die(step=1, rank=2)]}
    trainer_of(model, 3, "pytorch-ddp", global_batch_size=12, **fields).fit(data)
    printed = capfd.readouterr().out
    assert "global batch 12 = 4 samples x 3 ranks" in printed
    assert "batch_size=auto: 6 " in printed  # was 4 x 3
    assert farthest([*model.parameters()], plain_weights(data, whole=12)) < 1e-9


@pytest.mark.starts_processes
def test_a_second_fit_keeps_the_size_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    data = LimitedData(WHOLE, {0: 180 * MIB})  # of the ranks of the probe; this process has no limit
    trainer = trainer_of(wide_model(), 1, "serial")
    trainer.fit(data)
    trainer.fit(data)
    printed = capsys.readouterr().out
    assert printed.count("tried in 2 steps") == 1
    assert printed.count("batch_size=auto: 16, as in the fit before") == 1


# -- what a probe leaves ---------------------------------------------------------------


@pytest.mark.starts_processes
def test_a_probe_leaves_everything_as_it_was(tmp_path: Path) -> None:
    task, plan = task_of(Drawing()), plan_of()
    before = everything(task)
    chosen = choose_before_run(plan, task)
    assert (chosen.batch.batch_size, chosen.micro_batches) == (WHOLE, ())
    assert same(before, everything(task))
    in_this_process(plan, task, tmp_path)
    after = everything(task)
    assert [same(b, a) for b, a in zip(before, after, strict=True)][:4] == [False, True, False, False]


def test_a_probe_gets_no_more_data_than_it_reads() -> None:
    inputs = torch.zeros(10 * WHOLE, 16)
    task = task_of(
        Drawing(), train_data=Source.of((inputs, inputs[:, :1]), "train_loader"), callbacks=[Die(1, 0)]
    )
    sent = first_of(task, WHOLE)
    assert [len(tensor) for tensor in sent.train_data.tensors] == [WHOLE, WHOLE]
    assert sent.train_data.tensors[0].untyped_storage().nbytes() == WHOLE * 16 * 4
    assert (sent.callbacks, task.train_data.length, len(task.callbacks)) == ([], 10 * WHOLE, 1)


class Locked(Drawing):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class LockedData(LimitedData):
    """Cannot be pickled either."""

    def __init__(self) -> None:
        super().__init__(WHOLE, {})
        self.lock = threading.Lock()


@pytest.mark.parametrize("what", ["model", "data"])
def test_a_task_that_cannot_be_sent_to_a_probe_is_refused(what: str) -> None:
    locked = Source.of(LockedData(), "train_loader")
    task = task_of(Locked()) if what == "model" else task_of(Drawing(), train_data=locked)
    before = everything(task)
    with pytest.raises(UserError, match="cannot be pickled for another process") as raised:
        choose_before_run(plan_of(), task)
    assert (raised.value.field, raised.value.got) == ("batch_size", "auto")
    assert same(before, everything(task))


# -- probes that fail ------------------------------------------------------------------


def probed(
    sizes: tuple[int, ...], fits: int, monkeypatch: pytest.MonkeyPatch, leaves: bool = True
) -> tuple[list[int], RunPlan | Exception]:
    """The sizes that are tried where sizes above `fits` run out of memory, and what comes of it.

    Args:
        leaves: whether the ranks get as far as to choose a size.
    """
    tried = []

    def probe(plan: RunPlan, task: Task, step: Any, folder: Path, launcher: Any) -> dict[str, Any]:
        tried.append(plan.batch.batch_size)
        if leaves:
            (folder / "attempt.json").write_text(str(tried[-1]))
        if tried[-1] > fits:
            raise failed_rank()
        return {"size": tried[-1], "reason": "it fits"}

    monkeypatch.setattr(auto_batch.run, "probe", probe)
    monkeypatch.setattr(auto_batch, "_predicted", lambda *_: auto_batch._Predicted("in a test"))
    plan = replace(plan_of(global_batch_size=24), micro_batches=sizes)
    try:
        return tried, choose_before_run(plan, task_of(Drawing()))
    except (UserError, WorkerError) as error:
        return tried, error


def test_the_smallest_size_is_tried_before_none_is_said_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (24, 12, 8, 6, 4)  # of a pipeline, which takes no smaller ones
    tried, plan = probed(sizes, 4, monkeypatch)
    assert isinstance(plan, RunPlan)
    assert (tried, plan.batch.batch_size) == ([24, 12, 6, 4], 4)
    tried, error = probed(sizes, 3, monkeypatch)
    assert isinstance(error, UserError)
    assert "micro-batches of 24, 12, 6, 4 samples, the last of which is the smallest" in error.message
    assert tried == [24, 12, 6, 4]


def test_ranks_that_fail_before_they_try_a_size_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, error = probed((24, 12, 8), 4, monkeypatch, leaves=False)
    assert (tried, type(error)) == ([24], WorkerError)
    assert str(error) == str(failed_rank())


def failing_group(plan: RunPlan, task: Task, backend: Backend, folder: Path) -> dict[str, Any]:
    raise ValueError(f"with a group of {torch.distributed.get_world_size()}")


@pytest.mark.starts_processes
def test_ranks_of_a_probe_that_fails_have_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="with a group of 2") as raised:
        run.probe(
            plan_of(backend="pytorch-ddp", num_processes=2), task_of(Drawing()), failing_group, tmp_path
        )
    pid = int(re.search(r"pid (\d+)", raised.value.summary)[1])  # type: ignore[index]
    assert not Path(f"/proc/{pid}").exists()
    assert not torch.distributed.is_initialized()
