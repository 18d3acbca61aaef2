"""What the ranks compare besides weights: models, hyperparameters and modes that differ are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import Callback, Trainer, UserError
from distributed.interfaces.callback import Context
from distributed.testing.conformance import problem, small_model
from distributed.testing.rank_pool import RankPool

BACKENDS = ["pytorch-ddp", "fsdp"]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def wider_on_rank_1() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8 + rank()), nn.Linear(8 + rank(), 3)).double()


def frozen_on_rank_1() -> nn.Module:
    model = small_model()
    model[0].requires_grad_(rank() == 0)
    return model


def faster_on_rank_1(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank()))


class SlowsRank1(Callback):
    """Decides by something that ranks do not share."""

    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        if context.world.rank == 1 and context.progress.step == 2:
            context.optimizer.param_groups[0]["lr"] = 0.01


class SleepsOnRank0(Callback):
    """Samples from the model and forgets to return to training mode."""

    def on_log(self, context: Context, metrics: Any) -> None:
        context.model.eval()


def fit(pool: RankPool, backend: str, model: Any, **given: Any) -> None:
    trainer = Trainer(
        model, backend=backend, num_processes=2, device="cpu", batch_size=2, log_every_n_steps=1, **given
    )
    trainer.launcher = pool
    trainer.fit(problem(24), max_steps=6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (wider_on_rank_1, {}, r"built different models: '0.weight' is \(9, 6\).*on rank 1 and \(8, 6\)"),
        (frozen_on_rank_1, {}, "'0.weight' is .*requires_grad=False on rank 1 and .*=True on rank 0"),
        (small_model, {"optimizer": faster_on_rank_1}, "'lr' of parameter group 0 is 0.2 on rank 1 and 0.1"),
        (small_model, {"callbacks": [SlowsRank1()]}, "'lr' of parameter group 0 is 0.01 on rank 1"),
        (
            small_model,
            {"callbacks": [SleepsOnRank0()]},
            "SleepsOnRank0 runs on rank 0 only and changed the training mode of the model from True to False",
        ),
    ],
)
def test_ranks_that_differ_are_refused(
    rank_pool: RankPool, backend: str, model: Callable[[], nn.Module], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fit(rank_pool, backend, model, **given)
