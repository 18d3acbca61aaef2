"""Loaders and samplers as users bring them, trained on ranks, against a loop of plain PyTorch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    default_collate,
    get_worker_info,
)

from distributed import Trainer, UserError
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

NUM = 24
X = torch.randn(NUM, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
DATA = [(X[i], Y[i]) for i in range(NUM)]
EXACT = 1e-12


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def plain(batches: Sequence[Sequence[int]], rate: float = 0.1, momentum: float = 0.0) -> nn.Linear:
    """SGD with the mean loss of each batch of indices."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
    for rows in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[list(rows)]), Y[list(rows)]).backward()
        optimizer.step()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def trainer(model: nn.Module, pool: RankPool | None, ranks: int, **given: Any) -> Trainer:
    fields = {"loss_fn": nn.MSELoss(), "optimizer": "sgd", "learning_rate": 0.1, **given}
    return make_trainer(model, ranks, pool, **fields)


PLACES = [
    ("serial", 1, {}),
    ("pytorch-ddp", 2, {}),
    ("fsdp", 3, {}),
    ("deepspeed", 2, {"zero_stage": 1}),
]
everywhere = pytest.mark.parametrize(("backend", "ranks", "fields"), PLACES, ids=[p[0] for p in PLACES])


@everywhere
def test_a_global_batch_holds_for_a_loader_of_any_size(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    oracle = plain([range(i, i + 6) for i in range(0, NUM, 6)])
    for size in (1, 4, 6, 100):
        model = linear()
        run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=6, **fields)
        run.fit(DataLoader(DATA, size))
        assert distance(model, oracle) < EXACT


class ByWeight(DistributedSampler[Any]):
    """As Lightning's users write it: a subclass that draws, and takes the slice of its rank."""

    def __iter__(self) -> Iterator[int]:
        drawn = random.Random(self.seed + self.epoch).choices(range(6), k=self.total_size)
        return iter(drawn[self.rank :: self.num_replicas])


@everywhere
def test_a_subclass_of_distributed_sampler_draws_as_it_stands(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    sampler, order = ByWeight(DATA, num_replicas=1, rank=0), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order += list(sampler)
    model = linear()
    run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=6, epochs=2, **fields)
    run.fit(DataLoader(DATA, 6, sampler=ByWeight(DATA, num_replicas=1, rank=0)))
    assert distance(model, plain([order[i : i + 6] for i in range(0, 2 * NUM, 6)])) < EXACT


class Shard(Sampler[int]):
    """Takes its rank from the environment, where only ranks have one."""

    def __len__(self) -> int:
        return NUM // 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), NUM, int(os.environ["WORLD_SIZE"])))


def test_a_sampler_that_shards_is_refused(rank_pool: RankPool) -> None:
    sharded = DataLoader(DATA, 6, sampler=ByWeight(DATA, num_replicas=2, rank=0))
    with pytest.raises(UserError, match=r"num_replicas=2.*world of one \(num_replicas=1\)"):
        trainer(linear(), rank_pool, 2, backend="pytorch-ddp").fit(sharded)
    with pytest.raises(UserError, match="another part of the data on each rank"):
        trainer(linear(), rank_pool, 2, backend="pytorch-ddp").fit(DataLoader(DATA, 6, sampler=Shard()))


class Fours(Sampler[Any]):
    """Batches of four, from the end to the beginning."""

    def __init__(self, sizes: Sequence[int] = (4,) * 6) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        order = list(range(NUM))[::-1]
        return iter([[order.pop(0) for _ in range(size)] for size in self.sizes])

    def __len__(self) -> int:
        return len(self.sizes)


@everywhere
def test_a_global_batch_takes_whole_batches_of_a_batch_sampler(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    whole = 12
    order = list(range(NUM))[::-1]
    model = linear()
    run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=whole, **fields)
    if whole % (4 * ranks):
        with pytest.raises(UserError, match="multiples of 8"):
            run.fit(DataLoader(DATA, batch_sampler=Fours()))
        whole = 8
        run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=whole, **fields)
    history = run.fit(DataLoader(DATA, batch_sampler=Fours()))
    assert history.batch["global_batch_size"] == whole
    assert distance(model, plain([order[i : i + whole] for i in range(0, NUM, whole)])) < EXACT


@pytest.mark.parametrize(
    "field", [{"global_batch_size": 8}, {"lr_scaling": {"rule": "linear", "base_batch_size": 4}}]
)
def test_batches_of_different_sizes_have_no_global_batch(field: dict[str, Any]) -> None:
    loader = DataLoader(DATA, batch_sampler=Fours((2, 6, 8, 8)))
    with pytest.raises(UserError, match="differ in size"):
        trainer(linear(), None, 1, backend="serial", **field).fit(loader)
    model = linear()
    trainer(model, None, 1, backend="serial").fit(loader)
    order = list(range(NUM))[::-1]
    assert distance(model, plain([order[:2], order[2:8], order[8:16], order[16:]])) < EXACT


class Curriculum(Dataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return DATA[8 * self.epoch + index]


def test_persistent_workers_know_the_epoch() -> None:
    model = linear()
    loader = DataLoader(Curriculum(), 4, num_workers=2, persistent_workers=True)
    trainer(model, None, 1, backend="serial", epochs=3).fit(loader)
    assert distance(model, plain([range(i, i + 4) for i in range(0, NUM, 4)])) < EXACT


class Growing(Curriculum):
    """8 samples in the first epoch, and as many more in each."""

    def __len__(self) -> int:
        return 8 * (self.epoch + 1)

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


@pytest.mark.parametrize("stop", [3, 4, 6], ids=["within the second epoch", "later in it", "at its end"])
def test_data_that_grows_continues_after_a_restart(stop: int, tmp_path: Path) -> None:
    def run(**given: Any) -> nn.Linear:
        model = linear()
        loader = DataLoader(Growing(), 4, shuffle=True)
        fields = {"backend": "serial", "epochs": 3, "momentum": 0.5, "checkpoint_dir": tmp_path, **given}
        trainer(model, None, 1, **fields).fit(loader)
        return model

    whole = run(checkpoint_dir=tmp_path / "whole")
    run(max_steps=stop)
    assert distance(run(resume_from_checkpoint=True), whole) == 0


class OwnInfo(Dataset[Any]):
    offset = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return DATA[index + self.offset]


def move(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 8


def test_worker_init_fn_sees_the_users_dataset() -> None:
    model = linear()
    trainer(model, None, 1, backend="serial").fit(
        DataLoader(OwnInfo(), 4, num_workers=1, worker_init_fn=move)
    )
    assert distance(model, plain([range(8, 12), range(12, 16)])) < EXACT


class Noisy(Dataset[Any]):
    """Random numbers of all three generators, or of one of its own."""

    def __init__(self, own: bool = False) -> None:
        self.own = random.Random(0) if own else random

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return X[index] + self.own.random() + 0.3 * torch.randn(3), Y[index]


def mixed(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    share = torch.rand(())
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_repeat_after_a_stop_within_an_epoch(workers: int, tmp_path: Path) -> None:
    def run(own: bool = False, **given: Any) -> nn.Linear:
        model = linear()
        loader = DataLoader(Noisy(own), 4, shuffle=True, num_workers=workers, collate_fn=mixed)
        trainer(model, None, 1, backend="serial", deterministic=True, epochs=2, **given).fit(loader)
        return model

    whole = run()
    run(max_steps=8, checkpoint_dir=tmp_path / "a")
    assert distance(run(checkpoint_dir=tmp_path / "a", resume_from_checkpoint=True), whole) == 0
    run(own=True, max_steps=8, checkpoint_dir=tmp_path / "b")
    with pytest.raises(UserError, match=r"generator of their own.*set deterministic=false"):
        run(own=True, checkpoint_dir=tmp_path / "b", resume_from_checkpoint=True)


class Exhausted(Dataset[Any]):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return DATA[index] if index != 9 else next(iter(()))


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_of_a_sample_is_an_error(workers: int) -> None:
    with pytest.raises(RuntimeError, match="StopIteration for samples"):
        trainer(linear(), None, 1, backend="serial").fit(DataLoader(Exhausted(), 4, num_workers=workers))


def doubled(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return torch.cat([x, x]), torch.cat([y, y])


def test_settings_of_a_loader_beside_a_dataset() -> None:
    """collate_fn and workers without a DataLoader, and refused beside one."""
    given = {"backend": "serial", "global_batch_size": 6, "training_step": squares, "loss_fn": None}
    data = {"shuffle": False, "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
    model = linear()
    trainer(model, None, 1, collate_fn=doubled, data=data, **given).fit(Noted())
    assert distance(model, plain([range(i, i + 6) for i in range(0, NUM, 6)])) < EXACT
    for field, settings in {
        "collate_fn": {"collate_fn": doubled},
        "data.num_workers": {"data": data},
    }.items():
        with pytest.raises(UserError, match="DataLoader has settings of its own") as caught:
            trainer(linear(), None, 1, **given, **settings).fit(DataLoader(DATA, 6))
        assert caught.value.field == field
    with pytest.raises(UserError, match="need num_workers"):
        trainer(linear(), None, 1, data={"prefetch_factor": 2}, **given)


class Noted(Dataset[Any]):
    """Samples that only a worker reads."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        return DATA[index]


def squares(model: Any, batch: Any) -> tuple[Tensor, int]:
    half = len(batch[1]) // 2
    assert torch.equal(batch[0][:half], batch[0][half:])
    return ((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[1])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_samples_is_not_read_as_columns(kind: Any) -> None:
    rows = [X[i] for i in range(3)]
    run = trainer(
        linear(), None, 1, backend="serial", training_step=lambda m, b: m(b[0]).mean(), loss_fn=None
    )
    if kind is list:
        with pytest.raises(UserError, match=r"list of 3 tensors, the first of shape \(3,\).*torch.stack"):
            run.fit(rows)
    else:
        assert run.fit(tuple(rows)).num_samples == 3
