"""The plain form of a torch backend: what gradients are multiplied by for the true count of a batch (C2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

WINDOW, RATE = 8, 0.5


class Rows(torch.utils.data.Dataset[Any]):
    """29 samples: the second global batch has two masked targets, the third only such, the last 5 samples."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(29, 6, dtype=torch.float64, generator=generator)
        self.targets = torch.randint(0, 3, (29,), generator=generator)
        self.targets[[8, 9, *range(16, 24)]] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Ratios(Callback):
    """Fail a rank whose gradients were multiplied by other ratios; None is no pass over the gradients."""

    all_ranks = True

    def on_run_start(self, context: Any) -> None:
        self.found: list[Any] = []
        count_ratio = context.backend._count_ratio
        context.backend._count_ratio = lambda: (self.found.append(count_ratio()), self.found[-1])[1]

    def on_run_end(self, context: Any, status: str) -> None:
        assert self.found == [None, WINDOW / 6, 0.0, None]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


def trained_by_hand() -> nn.Module:
    plain, rows = model(), Rows()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for start in range(0, len(rows), WINDOW):
        inputs, targets = rows.inputs[start : start + WINDOW], rows.targets[start : start + WINDOW]
        if bool((targets >= 0).any()):  # torch's mean over nothing is not a number
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(inputs), targets).backward()
            optimizer.step()
    return plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_multiplied_only_where_targets_are_masked(ranks: int, rank_pool: RankPool) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
    trainer = make_trainer(
        trained,
        ranks,
        rank_pool if ranks > 1 else None,
        optimizer=optimizer,
        batch_size=2,
        global_batch_size=WINDOW,
        data={"shuffle": False},
        callbacks=[Ratios()],
    )
    trainer.fit(torch.utils.data.DataLoader(Rows(), batch_size=2))
    for ours, plain in zip(trained.parameters(), trained_by_hand().parameters(), strict=True):
        assert float((ours - plain).detach().abs().max()) < 1e-12
