"""Functions, models, optimizers and schedules that cannot be used are refused before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from distributed.errors import UserError
from distributed.testing.rank_pool import RankPool
from tests.support.refusals import points, refused
from tests.support.training import make_trainer


def test_functions_with_other_arguments_are_refused() -> None:
    refused("loss_fn", "called with (output, target)", "(output)", loss_fn=lambda output: output.mean())
    refused("training_step", "called with (model, batch)", training_step=lambda batch: 0.0)
    refused(
        "validation_step", "called with (model, batch)", validation_step=lambda model, batch, index: {},
        data=(points(), points()),
    )  # fmt: skip
    refused("metrics", "metric 'hits' is called with", metrics={"hits": lambda output: (output.sum(), 1)})


def backward(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    return loss


def test_a_step_that_calls_backward_is_refused() -> None:
    """With retain_graph, gradients would be added twice and nothing would fail."""
    refused("training_step", "calls backward() itself", "Remove backward()", training_step=backward)


def test_a_gradient_penalty_is_no_backward() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return F.cross_entropy(model(batch[0]), batch[1]) + slope.pow(2).mean()

    assert make_trainer(nn.Linear(4, 2), batch_size=4, training_step=step).fit(points(), max_steps=2).steps


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.AdamW, "Got 'AdamW"),
        (lambda model: SGD(model.parameters(), 0.1, weight_decay=0.1), "weight_decay=0.1"),
    ],
)
def test_optimizers_that_cannot_use_sparse_gradients(optimizer: Any, words: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 2))
    data = (torch.randint(0, 5, (12, 3)), points()[1])
    refused(
        "optimizer", "sparse gradients", "sparse=False", words, data=(data,), model=model, optimizer=optimizer
    )


def test_models_that_cannot_be_placed() -> None:
    for wrapped, field, words in (
        (nn.DataParallel(nn.Linear(4, 2)), "model", "Give model.module"),
        (nn.Linear(4, 2, device="meta"), "backend", "it has no values"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            make_trainer(wrapped, batch_size=4).fit(points())
        assert caught.value.field == field


def test_lazy_modules_need_a_batch_on_several_ranks(rank_pool: RankPool) -> None:
    make_trainer(nn.LazyLinear(2), batch_size=4).fit(points(), max_steps=2)
    with pytest.raises(UserError, match="pass one batch through the model"):
        make_trainer(nn.LazyLinear(2), 2, rank_pool, batch_size=4).fit(points(), max_steps=2)


def test_a_schedule_that_ends_before_the_run() -> None:
    def short(optimizer: Any) -> LRScheduler:
        return OneCycleLR(optimizer, 0.1, total_steps=3)

    def whole(optimizer: Any) -> LRScheduler:
        return OneCycleLR(optimizer, 0.1, total_steps=6)

    words = ["ends after 3 steps and the run takes 6", "Set total_steps=6"]
    refused("scheduler", *words, scheduler=short, epochs=2, scheduler_interval="step")
    refused("scheduler_interval", "after each of 2 epochs", scheduler=whole, epochs=2)
    given: dict[str, Any] = {"scheduler": whole, "scheduler_interval": "step", "epochs": 2}
    history = make_trainer(nn.Linear(4, 2), batch_size=4, **given).fit(points())
    assert len(history.epochs) == 2


def test_batches_of_validation_are_named() -> None:
    trainer = make_trainer(nn.Linear(4, 2), batch_size=4)
    with pytest.raises(UserError, match="validation validation_step") as caught:
        trainer.fit(points(), DataLoader(TensorDataset(points()[0]), 4))
    assert caught.value.field == "val_loader"
