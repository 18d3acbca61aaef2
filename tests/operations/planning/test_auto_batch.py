"""``batch_size=auto``: the largest micro-batch that fits, and the same training (C1, C2).

Memory is limited by the kernel in the ranks (RLIMIT_DATA), so that allocations really fail.
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer
from distributed.config import load
from distributed.data import Source
from distributed.errors import UserError, WorkerError
from distributed.interfaces.backend import Backend
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.interfaces.task import Task
from distributed.launch import run
from distributed.operations.planning import auto_batch
from distributed.operations.planning.apart import first_of
from distributed.operations.planning.auto_batch import choose_before_run, choose_in_ranks, probe_step
from distributed.operations.planning.memory_advice import plan_that_ran
from distributed.operations.planning.plan_memory import PlanMemory
from distributed.operations.planning.task_facts import TaskFacts
from distributed.planner.estimates.model_facts import Cut
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.system.private_folders import PrivateFolder
from distributed.testing.rank_pool import RankPool
from tests.support.limited_memory import LimitedData, WideModel
from tests.support.training import Die, make_trainer

MIB = 1 << 20
WHOLE = 64
"""Samples of a global batch."""


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


def wide_model() -> WideModel:
    torch.manual_seed(0)
    return WideModel()


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


# -- what a probe leaves ---------------------------------------------------------------


class Drawing(nn.Module):
    """Draws random numbers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 1, dtype=torch.float64), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.layer(x)) * self.scale
        return found


def everything(task: Task) -> list[Any]:
    """All that a probe could leave in this process."""
    model = task.model
    return [
        copy.deepcopy(model.state_dict()),
        [p.grad for p in model.parameters()],
        copy.deepcopy(task.optimizer.state_dict()),
        torch.get_rng_state(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        random.getstate(),
        model.training,
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def plan_of(**fields: Any) -> RunPlan:
    given = {"backend": "serial", "device": "cpu", "batch_size": "auto", "global_batch_size": WHOLE, **fields}
    return resolve(load(overrides=given), get_catalog(), Facts(), Resources())


def task_of(model: nn.Module, **fields: Any) -> Task:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Source.of(LimitedData(WHOLE, {}), "train_loader")
    return Task(
        **{"model": model, "optimizer": optimizer, "loss_fn": nn.MSELoss(), "train_data": data, **fields}
    )


def in_this_process(plan: RunPlan, task: Task, folder: Path) -> None:
    """The mutant of a probe: it trains with the objects of the run."""
    backend = get_catalog().load_backend(plan.spec)
    backend.setup(plan)
    probe_step(plan, task, backend, folder, needs="in a test")
    backend.teardown()


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


# -- what a prediction leaves ------------------------------------------------------------


class Curriculum(nn.Module):
    """A loss whose weight grows with its calls, and that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (output - target).square().mean() * (self.calls + random.random())


class ReadOnce(LimitedData):
    """Counts what was read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return super().__getitem__(index)


def counted_step(model: nn.Module, batch: Any, calls: list[int] | None = None) -> Tensor:
    """A training step with a state in a closure."""
    assert calls is not None
    calls.append(len(calls))
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def watched_task(with_step: bool) -> Task:
    """A task all of whose parts count their calls."""
    model = Drawing()
    model.layer.register_forward_hook(partial(count_call, model))
    data = Source.of(ReadOnce(WHOLE, {}), "train_loader")
    given = {"training_step": partial(counted_step, calls=[]), "loss_fn": None} if with_step else {}
    return task_of(model, **{"train_data": data, "loss_fn": Curriculum(), **given})


def count_call(model: Any, *_: Any) -> None:
    model.calls = getattr(model, "calls", 0) + 1


def states(task: Task) -> list[Any]:
    """All that a prediction could change, as values that can be compared."""
    step, loss = task.training_step, task.loss_fn
    return [
        len(step.keywords["calls"]) if step else loss.calls,
        getattr(task.model, "calls", 0),
        task.train_data.dataset.reads,
        torch.get_rng_state().sum().item(),
        hash(random.getstate()),
        int(np.random.get_state()[1].astype(np.int64).sum()),  # type: ignore[index, union-attr, call-overload]
    ]


def states_after_choice(plan: RunPlan, task: Task, backend: Backend, folder: Path) -> dict[str, Any]:
    """The state of the ranks before and after they chose a size, and after the mutant, which predicts in
    rank 0 itself."""
    before = states(task)
    chosen = choose_in_ranks(plan, task, backend)
    after = states(task)
    if backend.world.rank == 0:
        auto_batch._predict_needs(plan, task)
    mutant = states(task)
    return {
        "changed": backend.gather_objects(before != after),
        "changed by mutant": backend.gather_objects(before != mutant),
        "size": chosen.batch.batch_size,
    }


@pytest.mark.starts_processes
@pytest.mark.parametrize("with_step", [False, True], ids=["loss", "training step"])
def test_a_prediction_leaves_all_ranks_in_the_same_state(with_step: bool) -> None:
    plan = plan_of(backend="pytorch-ddp", num_processes=2)
    with PrivateFolder() as folder:
        found = run.probe(plan, watched_task(with_step), states_after_choice, Path(folder))
    assert found == {"changed": [False, False], "changed by mutant": [True, False], "size": WHOLE // 2}


@pytest.mark.starts_processes
def test_a_prediction_for_this_process_leaves_it_as_it_was() -> None:
    task = watched_task(with_step=False)
    before = states(task), everything(task)
    needs = auto_batch._predicted(plan_of(), task).needs
    assert isinstance(needs, dict)
    assert set(needs) == set(plan_of().micro_batches)
    assert same([*before], [states(task), everything(task)])


def choose_and_fail(plan: RunPlan, task: Task, backend: Backend, _: Path) -> dict[str, Any]:
    choose_in_ranks(plan, task, backend)
    raise MemoryError


@pytest.mark.starts_processes
def test_the_error_of_ranks_has_the_size_that_they_chose() -> None:
    plan = plan_of(backend="pytorch-ddp", num_processes=2)
    data = Source.of(LimitedData(WHOLE, {0: 110 * MIB, 1: 110 * MIB}), "train_loader")
    task = task_of(wide_model(), train_data=data)
    with PrivateFolder() as folder, pytest.raises(WorkerError) as raised:
        run.probe(plan, task, choose_and_fail, Path(folder))
    error = raised.value
    assert [*error.chosen_batch] == [2, 8]  # type: ignore[misc]
    assert plan_that_ran(plan, error, None).batch.batch_size == 8
    assert plan_that_ran(plan, failed_rank(), None) is plan
    error.chosen_batch = (1, 4)  # of an elastic run with one rank left
    fewer = plan_that_ran(plan, error, None)
    assert (fewer.world_size, fewer.batch.batch_size, fewer.batch.global_batch_size) == (1, 4, WHOLE)


class Slow(Drawing):
    """Its prediction takes until the file exists."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        while not self.path.exists():
            threading.Event().wait(0.01)
        return super().forward(x)


_BROADCASTS = 6


def broadcasts_until_predicted(
    path: Path, plan: RunPlan, task: Task, backend: Backend, _: Path
) -> dict[str, Any]:
    """Rank 1 lets the prediction end with a broadcast that it has waited for: without it, the ranks hang."""
    number, broadcast = 0, backend.broadcast_object

    def counted(value: Any) -> Any:
        nonlocal number
        number += 1
        if number == _BROADCASTS and backend.world.rank == 1:
            path.touch()
        return broadcast(value)

    backend.broadcast_object = counted  # type: ignore[method-assign, assignment]
    plan = replace(plan, config=plan.config.model_copy(update={"collective_timeout": 0.2}))
    chosen = choose_in_ranks(plan, task, backend)
    return {"size": chosen.batch.batch_size, "waited": number >= _BROADCASTS}


@pytest.mark.starts_processes
def test_ranks_that_wait_for_a_prediction_get_a_broadcast_before_each_timeout(tmp_path: Path) -> None:
    path = tmp_path / "predicted"
    plan = plan_of(backend="pytorch-ddp", num_processes=2)
    with PrivateFolder() as folder:
        step = partial(broadcasts_until_predicted, path)
        found = run.probe(plan, task_of(Slow(path)), step, Path(folder))
    assert found == {"size": WHOLE // 2, "waited": True}


# -- agreement -------------------------------------------------------------------------


def sizes_of_ranks(plan: RunPlan, task: Task, backend: Backend, folder: Path) -> dict[str, Any]:
    """What each rank chooses: together, and by the mutant, on its own."""
    together = choose_in_ranks(plan, task, backend).batch.batch_size
    room = auto_batch._room(plan, task, backend.world.device)
    needs = auto_batch._predict_needs(plan, task)["needs"]
    alone = auto_batch._choice_for(plan, {int(size): need for size, need in needs.items()}, room).size
    return {"together": backend.gather_objects(together), "alone": backend.gather_objects(alone)}


@pytest.mark.starts_processes
def test_ranks_with_unequal_memory_choose_the_same_size() -> None:
    plan = plan_of(backend="pytorch-ddp", num_processes=2)
    data = Source.of(LimitedData(WHOLE, {0: 600 * MIB, 1: 110 * MIB}), "train_loader")
    task = task_of(wide_model(), train_data=data)
    with PrivateFolder() as folder:
        found = run.probe(plan, task, sizes_of_ranks, Path(folder))
    assert found == {"together": [8, 8], "alone": [32, 8]}


# -- probes that fail ------------------------------------------------------------------


def failed_rank(exc_type: str = "MemoryError") -> WorkerError:
    return WorkerError(f"rank 0 raised {exc_type}: far too large", rank=0, host="here", exc_type=exc_type)


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


# -- where the micro-batch changes the training ------------------------------------------


class Counting(Drawing):
    """Counts its forward passes."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 0.0 * self.scale + 1.0
        return super().forward(x)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    scores = output @ target.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(
    ("model", "loss_fn", "names"),
    [
        (nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double(), nn.MSELoss(), "'1'"),
        (Counting(), nn.MSELoss(), "'scale'"),
        (nn.Linear(16, 1).double(), contrastive, "compares the samples"),
    ],
    ids=["batch norm", "buffer", "contrastive loss"],
)
def test_a_model_that_depends_on_the_micro_batch_is_refused(
    model: nn.Module, loss_fn: Any, names: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=names) as raised:
        in_this_process(plan_of(), task_of(model, loss_fn=loss_fn), tmp_path)
    assert (raised.value.field, raised.value.got) == ("batch_size", "auto")
    assert "to numbers" in str(raised.value.remedy)


class Routed(nn.Linear):
    """Has a load-balancing loss, as models of transformers with experts have."""

    def __init__(self) -> None:
        super().__init__(16, 1, dtype=torch.float64)
        self.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.1)


def by_frequency() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 1), nn.Embedding(4, 1, scale_grad_by_freq=True)).double()


@pytest.mark.parametrize("model", [Routed(), by_frequency()], ids=["router", "scale_grad_by_freq"])
def test_layers_are_checked_for_all_sizes_before_any_memory_is_predicted(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("something was predicted")

    monkeypatch.setattr(auto_batch, "_predicted", fail)
    task = task_of(model, loss_fn=None)
    with pytest.raises(UserError) as raised:
        choose_before_run(plan_of(), task)
    assert (raised.value.field, raised.value.got) == ("batch_size", "auto")
    assert raised.value.allowed == f"{WHOLE}, one micro-batch on one rank"
    with pytest.raises(UserError) as in_rank:  # the whole share fits into one micro-batch here
        in_this_process(plan_of(), task, tmp_path)
    assert in_rank.value.args == raised.value.args


@pytest.mark.starts_processes
def test_what_a_factory_builds_is_checked_before_a_size_is_tried(capfd: pytest.CaptureFixture[str]) -> None:
    task = replace(task_of(nn.Linear(16, 1)), model=by_frequency, optimizer=None)
    with pytest.raises(UserError, match="scale_grad_by_freq") as raised:
        choose_before_run(plan_of(), task)
    assert (raised.value.field, raised.value.got) == ("batch_size", "auto")


def test_a_loss_over_pairs_is_refused_for_micro_batches_of_one_sample(tmp_path: Path) -> None:
    plan = plan_of()
    single = replace(plan, micro_batches=(1,))
    with pytest.raises(UserError, match="compares the samples") as raised:
        in_this_process(single, task_of(nn.Linear(16, 1).double(), loss_fn=contrastive), tmp_path)
    assert (raised.value.field, raised.value.got) == ("batch_size", "auto")


class PerToken(nn.Module):
    """A model of token sequences that computes its own loss, weighted by samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3, dtype=torch.float64)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.layer(inputs), labels[:, 0])
        return {"loss": loss + 0.1 * self.layer.weight.square().sum()}


@pytest.mark.parametrize("sizes", [(WHOLE,), (8,)], ids=["whole", "divided"])
def test_a_loss_of_unknown_weight_is_announced_whatever_size_fits(
    sizes: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"inputs": torch.zeros(16, dtype=torch.float64), "labels": torch.tensor([index % 3, 0])}
        for index in range(WHOLE)
    ]
    data = Source.of(rows, "train_loader")
    task = task_of(PerToken(), loss_fn=None, train_data=data)
    in_this_process(replace(plan_of(), micro_batches=sizes), task, tmp_path)
    assert [r.getMessage().endswith("by the memory of the machine") for r in caplog.records] == [True]


def test_frozen_statistics_are_accepted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model[1].eval()
    in_this_process(plan_of(), task_of(model), tmp_path)
    assert json.loads((tmp_path / "attempt.json").read_text()) == WHOLE


# -- ranks that choose by prediction -----------------------------------------------------


def decided(plan: RunPlan, task: Task, has_fitted: bool) -> RunPlan:
    backend = get_catalog().load_backend(plan.spec)
    backend.setup(plan)
    return choose_in_ranks(plan, task, backend, has_fitted)


def test_a_size_that_has_fitted_is_kept_where_memory_is_not_predicted() -> None:
    model = wide_model()
    task = task_of(model, optimizer=torch.optim.Rprop(model.parameters()))
    plan = plan_of()
    plan = replace(plan, batch=replace(plan.batch, batch_size=4, gradient_accumulation_steps=16))
    assert decided(plan, task, has_fitted=True).batch == plan.batch
    with pytest.raises(UserError, match="choose by prediction"):
        decided(plan, task, has_fitted=False)
    assert decided(plan, task_of(model), has_fitted=True).batch.batch_size == WHOLE


@pytest.mark.starts_processes
def test_a_second_fit_keeps_the_size_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    data = LimitedData(WHOLE, {0: 180 * MIB})  # of the ranks of the probe; this process has no limit
    trainer = trainer_of(wide_model(), 1, "serial")
    trainer.fit(data)
    trainer.fit(data)
    printed = capsys.readouterr().out
    assert printed.count("tried in 2 steps") == 1
    assert printed.count("batch_size=auto: 16, as in the fit before") == 1


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


# -- remedies, and what a failure leaves ---------------------------------------------------


class ReadsValues(nn.Linear):
    """Cannot run without values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.detach().numpy().any())


@pytest.mark.parametrize("what", ["model", "data"])
def test_the_remedy_is_one_that_the_caller_has(what: str) -> None:
    model = ReadsValues(16, 1).double() if what == "model" else Drawing()
    stream = SimpleNamespace(is_map=False)
    task = task_of(model, **({"train_data": stream} if what == "data" else {}))
    plan = replace(plan_of(), micro_batches=())
    with pytest.raises(UserError) as in_a_run:
        PlanMemory(task).parts(plan)
    with pytest.raises(UserError) as in_a_plan:
        TaskFacts(task).source(plan.config, "fp32", "cpu")(Cut())
    for error in (in_a_run.value, in_a_plan.value):
        assert "batch_size=auto" not in str(error)
    assert "batch_size" not in str(in_a_plan.value.remedy)
    assert in_a_run.value.remedy == "Set batch_size to a number"


def test_facts_that_fail_leave_no_process_group() -> None:
    """The process is a rank of a group while facts of a divided model are recorded."""
    task, plan = task_of(nn.Sequential(ReadsValues(16, 16), nn.Linear(16, 1)).double()), plan_of()
    hook = sys.excepthook
    tensor = {"parallel.tensor": 2, "parallel.tensor_plan": {"1": "rowwise"}}
    config = load(overrides={**plan.config.model_dump(exclude_unset=True), **tensor})
    with pytest.raises(UserError, match="does not run without values"):
        TaskFacts(task).source(config, "fp32", "cpu")(Cut(tensor=2))
    assert not torch.distributed.is_initialized()
    assert sys.excepthook is hook


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
