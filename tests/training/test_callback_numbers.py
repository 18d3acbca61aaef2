"""Random numbers that callbacks and plugins draw, at any event, are apart from those of training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.interfaces.callback import Context
from distributed.registry.catalog import get_catalog
from distributed.registry.hookspecs import hookimpl
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DATA = (X, X.sum(1, keepdim=True).sin())


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with closing(RankPool()) as ranks:
        yield ranks


class Noisy(nn.Module):
    """Trains on random numbers of all three generators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = nn.functional.dropout(x, 0.5) * (1 + random.random()) + float(numpy.random.rand())
        return self.last(x)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


class Draws(Callback):
    """Draws at every event; keeps what it drew at events of each step on its rank."""

    def __init__(self, folder: Path, all_ranks: bool, every: int = 1) -> None:
        self.folder, self.all_ranks, self.every = folder, all_ranks, every

    def state_dict(self) -> dict[str, Any]:
        draw()
        return {"some": "state"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draw()


def _event(name: str) -> Any:
    def act(self: Draws, context: Context, *args: Any) -> None:
        if context.progress.step % self.every == 0:
            with (self.folder / f"rank{context.world.rank}").open("a") as file:
                file.write(f"{name} {context.progress.step} {draw()}\n")

    return act


for _name in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Draws, _name, _event(_name))


class Plugin:
    """Draws when it is asked for its callbacks."""

    @hookimpl
    def register_callbacks(self) -> list[Callback]:
        draw()
        return []


def train(
    pool: RankPool | None, ranks: int, callbacks: list[Callback], folder: Path, **fields: Any
) -> list[torch.Tensor]:
    model = Noisy()
    common = {"global_batch_size": 6, "epochs": 2, "learning_rate": 0.05, "checkpoint_frequency": 1}
    trainer: Trainer = make_trainer(
        model, ranks, pool, folder=folder, loss_fn=nn.MSELoss(), callbacks=callbacks, **{**common, **fields}
    )
    trainer.fit(DATA, DATA)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize(("backend", "ranks"), [("serial", 1), ("pytorch-ddp", 2), ("fsdp", 2)])
def test_training_is_the_same(
    pool: RankPool, tmp_path: Path, backend: str, ranks: int, all_ranks: bool, deterministic: bool
) -> None:
    fields = {"backend": backend, "deterministic": deterministic}
    given = pool if ranks > 1 else None
    plain = train(given, ranks, [], tmp_path / "plain", **fields)
    drawing = train(given, ranks, [Draws(tmp_path, all_ranks)], tmp_path / "drawing", **fields)
    assert (tmp_path / "rank0").exists()
    assert all(map(torch.equal, plain, drawing))


def test_a_plugin_draws_apart(tmp_path: Path) -> None:
    plain = train(None, 1, [], tmp_path / "plain")
    plugin = Plugin()
    get_catalog().manager.register(plugin)
    try:
        drawing = train(None, 1, [], tmp_path / "drawing")
    finally:
        get_catalog().manager.unregister(plugin)
    assert all(map(torch.equal, plain, drawing))


def test_a_callbacks_numbers_follow_from_seed_step_and_event(pool: RankPool, tmp_path: Path) -> None:
    """So they are those of any number of ranks, of a resumed run, and beside any other callback."""
    found = {}
    for name, ranks, seed, every in (
        ("one", 1, 0, 1),
        ("two", 2, 0, 1),
        ("few", 2, 0, 2),
        ("other", 1, 1, 1),
    ):
        (tmp_path / name).mkdir()
        callbacks: list[Callback] = [Draws(tmp_path / name, True, every)]
        train(pool if ranks > 1 else None, ranks, callbacks, tmp_path / name / "saved", seed=seed)
        lines = [(tmp_path / name / f"rank{rank}").read_text().splitlines() for rank in range(ranks)]
        # A save ends after a while, on rank 0.
        found[name] = [[line for line in own if "on_checkpoint" not in line] for own in lines]
    (one,) = found["one"]
    steps = [line for line in one if line.startswith("on_step_end")]
    assert len({line.partition("(")[2] for line in steps}) == len(steps) == 8
    assert found["two"] == [one, one]
    assert set(found["few"][0]) < set(one)
    assert not set(found["other"][0]) & set(one)
