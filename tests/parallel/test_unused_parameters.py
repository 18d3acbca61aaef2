"""Ranks that use different parameters in a step reduce the same ones, in the same order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

STEPS, BATCH = 4, 4
SGD = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, momentum=0.9)


class Branches(nn.Module):
    """Each sample takes the branch that its last feature names; a branch without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, which = self.first(inputs[:, :4]).tanh(), inputs[:, 4].long()
        found = torch.zeros_like(hidden)
        for number, branch in enumerate(self.branches):
            mask = which == number
            if mask.any():
                found[mask] = branch(hidden[mask]).tanh()
        return self.last(found)


def build() -> Branches:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Branches().double()


def data() -> tuple[Tensor, Tensor]:
    """Of each global batch the first half takes one branch, the second another; the third is used late."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 5, generator=draw, dtype=torch.float64)
    inputs[:, 4] = torch.tensor([0, 0, 1, 1] * (STEPS - 1) + [2, 2, 1, 1])
    return inputs, torch.randint(2, (STEPS * BATCH,), generator=draw)


def train_plainly() -> dict[str, Tensor]:
    model, (inputs, targets) = build(), data()
    optimizer = SGD(model.parameters())
    for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25.0])
@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        (2, {}),
        (2, {"compression": {"codec": "top-k", "ratio": 1.0}}),
        (4, {"parallel": {"tensor": 2, "tensor_plan": {"branches.*": "colwise_gather_output"}}}),
    ],
)
def test_each_rank_has_its_own_branches(
    rank_pool: RankPool, ranks: int, fields: dict[str, Any], bucket_cap_mb: float
) -> None:
    model = build()
    trainer = make_trainer(
        model,
        ranks,
        rank_pool,
        global_batch_size=BATCH,
        optimizer=SGD,
        find_unused_parameters=True,
        bucket_cap_mb=bucket_cap_mb,
        data={"shuffle": False},
        **fields,
    )
    trainer.fit(data(), epochs=1)
    for name, expected in train_plainly().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-9, atol=1e-9)
