"""``batch_size=auto`` refuses what depends on the micro-batch, whatever size the memory allows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.data import Source
from distributed.errors import UserError
from distributed.operations.planning import auto_batch
from distributed.operations.planning.auto_batch import choose_before_run
from tests.operations.planning.auto_batch_tasks import (
    WHOLE,
    Drawing,
    in_this_process,
    plan_of,
    task_of,
)


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
