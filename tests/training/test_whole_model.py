"""context.whole_model(): the model of one process inside of a callback, under every torch backend."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer
from distributed.errors import UserError
from distributed.interfaces.callback import Callback, Context
from distributed.testing.rank_pool import RankPool
from tests.campaigns.backends import BACKENDS
from tests.support.training import make_trainer

pytestmark = pytest.mark.slow

EXACT = 1e-9
SHARED = ["serial", "ddp 2", "fsdp 2", "fsdp 3", "zero 0", "zero 1", "zero 3", "horovod 2"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with closing(RankPool()) as ranks:
        yield ranks


class Tied(nn.Module):
    """Tied weights, a buffer, a list of parameters, dropout, a frozen layer, an attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.cell, self.norm, self.drop = nn.GRU(4, 4, batch_first=True), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        vars(self.first.weight)["no_decay"] = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.frozen(self.first(x))))
        result: Tensor = self.last(self.cell(hidden[:, None])[0][:, 0])
        return result


def tied() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied().double()


def data(length: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(length) % 4


class Reader(Callback):
    """Writes what rank `rank` finds at each step."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            assert type(model) is Tied
            assert not model.training
            assert model.last.weight is model.first.weight
            assert vars(model.first.weight)["no_decay"]
            assert not torch.is_grad_enabled()
            torch.rand(3)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            found = {"state": state, "output": model(data()[0])}
        name = f"{context.progress.step}-{context.world.rank}.pt"
        torch.save(found, Path(self.folder, name))


def trainer_of(
    model: Any, backend: str, pool: RankPool, *callbacks: Callback, batch_size: int = 2
) -> Trainer:
    name, ranks, options = BACKENDS[backend]
    return make_trainer(
        model, ranks, pool, backend=name, batch_size=batch_size, optimizer="sgd", learning_rate=0.1,
        data={"shuffle": False}, seed=3, callbacks=list(callbacks), **options,
    )  # fmt: skip


@pytest.mark.parametrize("backend", SHARED)
def test_it_is_the_model_that_training_leaves(backend: str, pool: RankPool, tmp_path: Path) -> None:
    read, unread = tied(), tied()
    trainer_of(read, backend, pool, Reader(tmp_path)).fit(data(), max_steps=3)
    trainer_of(unread, backend, pool).fit(data(), max_steps=3)
    for name, value in unread.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name  # reading changes nothing, masks included
    ranks = BACKENDS[backend][1]
    found = [torch.load(tmp_path / f"3-{rank}.pt") for rank in range(ranks)]
    names = dict(read.named_parameters()).keys()
    for rank in found:
        assert rank["state"].keys() == read.state_dict().keys()
        for name in names:
            assert torch.allclose(rank["state"][name], read.state_dict()[name], rtol=0, atol=EXACT)
    read.eval()
    with torch.no_grad():
        assert torch.allclose(found[0]["output"], read(data()[0]), rtol=0, atol=EXACT)
    first = torch.load(tmp_path / "1-0.pt")["state"]
    assert not torch.allclose(first["first.weight"], found[0]["state"]["first.weight"])


class Averaging(Callback):
    """An exponential moving average, as users write it."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.average: nn.Module | None = None
        self.folder = str(folder)

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            if self.average is None:
                self.average = copy.deepcopy(model)
            for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.5)

    def on_run_end(self, context: Context, status: str) -> None:
        if context.world.rank == 0 and self.average is not None:
            torch.save(self.average.state_dict(), Path(self.folder, "average.pt"))


def test_an_average_is_that_of_one_process(pool: RankPool, tmp_path: Path) -> None:
    found = []
    for backend, size in (("serial", 4), ("fsdp 2", 2), ("zero 3", 2)):
        (tmp_path / backend).mkdir()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        callback = Averaging(tmp_path / backend)
        trainer_of(model, backend, pool, callback, batch_size=size).fit(data(), max_steps=4)
        found.append(torch.load(tmp_path / backend / "average.pt"))
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.allclose(other[name], value, rtol=0, atol=EXACT), name


class Changing(Callback):
    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        with context.whole_model() as model:
            model.first.weight.mul_(0.5)


@pytest.mark.parametrize("backend", ["serial", "ddp 2", "fsdp 2", "zero 3"])
def test_a_change_is_refused(backend: str, pool: RankPool) -> None:
    with pytest.raises(UserError, match=r"changed 'first.weight' inside context.whole_model") as caught:
        trainer_of(tied(), backend, pool, Changing()).fit(data(), max_steps=1)
    assert "copy.deepcopy" in str(caught.value.remedy)


class OnRankZero(Callback):
    def on_step_end(self, context: Context) -> None:
        with context.whole_model():
            pass


@pytest.mark.parametrize("backend", ["ddp 2", "fsdp 2"])
def test_a_callback_on_rank_0_is_refused(backend: str, pool: RankPool) -> None:
    with pytest.raises(UserError, match="OnRankZero acts on rank 0 alone") as caught:
        trainer_of(tied(), backend, pool, OnRankZero()).fit(data(), max_steps=1)
    assert "all_ranks = True" in str(caught.value.remedy)
    trainer_of(tied(), "serial", pool, OnRankZero()).fit(data(), max_steps=1)
