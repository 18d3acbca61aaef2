"""Predictions of ``batch_size=auto``: they leave everything as it was, all ranks choose the same, and where
there are none the error says what to do."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distributed.config import load
from distributed.data import Source
from distributed.errors import UserError, WorkerError
from distributed.interfaces.backend import Backend
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.launch import run
from distributed.operations.planning import auto_batch
from distributed.operations.planning.auto_batch import choose_in_ranks
from distributed.operations.planning.memory_advice import plan_that_ran
from distributed.operations.planning.plan_memory import PlanMemory
from distributed.operations.planning.task_facts import TaskFacts
from distributed.planner.estimates.model_facts import Cut
from distributed.registry.catalog import get_catalog
from distributed.system.private_folders import PrivateFolder
from tests.operations.planning.auto_batch_tasks import (
    MIB,
    WHOLE,
    Drawing,
    everything,
    failed_rank,
    plan_of,
    same,
    task_of,
    wide_model,
)
from tests.support.limited_memory import LimitedData

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
    assert [*error.chosen_batch] == [2, 4]  # type: ignore[misc]
    assert plan_that_ran(plan, error, None).batch.batch_size == 4
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
    assert found == {"together": [4, 4], "alone": [32, 8]}


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
