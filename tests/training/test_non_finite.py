"""Losses that are not numbers: stop, skip exactly that step on all ranks, or go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import UserError
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


def poisoned(bad: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(dim=1) > 0).long()
    x[bad] = float("nan")
    return x, y


def nan_run(pool: RankPool, ranks: int, bad: int, **given: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 2)
    trainer = make_trainer(
        model, ranks, pool, learning_rate=0.1, optimizer="sgd", batch_size=8 // ranks,
        data={"shuffle": False}, **given,
    )  # fmt: skip
    return model, trainer.fit(poisoned(bad))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_nan_stops(ranks: int, rank_pool: RankPool) -> None:
    """Sample 13 is in the second step; of two ranks it is rank 1's."""
    with pytest.raises(UserError) as caught:
        nan_run(rank_pool, ranks, 13)
    error, text = caught.value, str(caught.value)
    assert (error.field, error.got, error.allowed) == (
        "on_nan",
        "stop",
        "stop, skip (leave such steps out), ignore",
    )
    assert f"the loss is nan at step 2 (epoch 0) on rank {ranks - 1}, with learning rate 0.1" in text
    assert "Lower learning_rate" in text
    assert "\n" not in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_nan_is_skipped_on_all_ranks(ranks: int, rank_pool: RankPool) -> None:
    """The second step of two is left out: what remains is the first alone, on every rank."""
    torch.manual_seed(0)
    model, history = nan_run(rank_pool, ranks, 13, on_nan="skip")
    assert history.num_skipped_steps == 1
    assert [math.isfinite(loss) for loss in history.steps["loss"]] == [True, False]
    assert history.epochs[0]["train_loss"] == history.steps["loss"][0]
    torch.manual_seed(0)
    first, _ = nan_run(rank_pool, ranks, 13, on_nan="skip", max_steps=1)
    assert torch.equal(model.weight, first.weight)
    assert bool(model.weight.isfinite().all())


def test_nan_may_be_ignored(rank_pool: RankPool) -> None:
    model, history = nan_run(rank_pool, 2, 1, on_nan="ignore")
    assert history.num_skipped_steps == 0
    assert len(history.steps["loss"]) == 2
    assert not bool(model.weight.isfinite().all())
