"""Runs one after the other in the same processes share their process groups."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

DATA = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)


def threads(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Threads of gloo in this process."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return float(sum("gloo" in name for name in names)), 1


def test_threads_do_not_grow_with_runs(rank_pool: RankPool) -> None:
    found = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        trainer = make_trainer(
            model,
            4,
            rank_pool,
            global_batch_size=8,
            metrics={"threads": threads},
            parallel={"data": 2, "tensor": 2},
        )
        found.append(trainer.fit(DATA, DATA, epochs=1).epochs[-1]["val_threads"])
    assert found[0] == found[1] == found[2]
