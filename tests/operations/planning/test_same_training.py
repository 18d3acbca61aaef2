"""Plans for models that another division or another micro-batch would train in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import distributed
from distributed.operations.planning.plans import Plans
from distributed.operations.planning.stage_check import StageCheck
from tests.operations.planning.test_plans import chain, vectors


class Around(nn.Module):
    """Adds what goes into its blocks to what comes out of them, which stages do not send."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.blocks(x))  # type: ignore[no-any-return]


class Counts:
    """A loss with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        inputs, target = batch
        return functional.cross_entropy(model(inputs), target)


def contrastive(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    first = functional.normalize(model(batch[0]), dim=1)
    second = functional.normalize(model(batch[0] + 0.1), dim=1)
    return functional.cross_entropy(first @ second.T, torch.arange(len(first)))


def planned(model: nn.Module, training_step: Any = None, **given: Any) -> Plans:
    """Plans for a model on two CPU ranks."""
    options = {"hardware": "CPU", "num_devices": 2, "global_batch_size": 16, "num_plans": 99} | given
    return distributed.plan(model, vectors(), training_step=training_step, **options)


def test_stages_that_change_the_output_are_not_listed() -> None:
    plans = planned(Around(), backend="pytorch-ddp")
    assert {row.split.dims.pipeline for row in plans.rows} == {1}
    assert any(
        "computes something else when 2 stages divide it" in reason for reason in plans.table.reasons()
    )


def test_stages_of_a_chain_are_listed_and_leave_the_task_as_it_was() -> None:
    model, step = chain(), Counts()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    plans = planned(model, step, backend="pytorch-ddp")
    assert {row.split.dims.pipeline for row in plans.rows} == {1, 2}
    assert step.calls == 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


def test_stages_that_are_not_compared_would_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant."""
    monkeypatch.setattr(StageCheck, "__call__", lambda self, plan: None)
    plans = planned(Around(), backend="pytorch-ddp")
    assert {row.split.dims.pipeline for row in plans.rows} == {1, 2}


def test_a_loss_that_compares_samples_keeps_its_micro_batches() -> None:
    plans = planned(chain(), contrastive)
    found = {(row.split.micro_batch, row.split.num_micro_batches) for row in plans.rows}
    assert found == {(8, 1)}
    assert {row.split.dims.data_parallel_size for row in plans.rows} == {2}
    assert plans.notes[0].startswith("the loss compares the samples of a micro-batch with each other: every")


def test_statistics_without_a_batch_size_keep_the_share_of_a_rank() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    plans = planned(model)
    assert {(row.split.micro_batch, row.split.num_micro_batches) for row in plans.rows} == {(8, 1)}


def test_several_losses_over_targets_are_announced() -> None:
    def step(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        spread = torch.cat([batch[1], batch[1]])
        both = torch.cat([output, output])
        return functional.cross_entropy(output, batch[1]) + functional.cross_entropy(both, spread)

    notes = planned(chain(), step, axes=["data"]).notes
    assert any("another training if the number of targets of a sample varies" in note for note in notes)
