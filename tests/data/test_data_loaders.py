"""What becomes of the loader, dataset or tensors that a user gives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from distributed import Trainer
from distributed.data import Feed, Source
from distributed.errors import UserError
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


class Ids(Dataset[int]):
    """Sample i is i; remembers the epoch it was told."""

    epoch = -1

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def train(loader: Any) -> Source:
    return Source.of(loader, "train_loader")


def order(source: Source, epoch: int = 0, **options: Any) -> list[int]:
    """Sample ids in the order in which one process reads them."""
    feed = Feed(source, 1, **options)
    return [int(window.micro_batches[0].batch) for window in feed.windows(epoch)]


# -- the order that a loader asks for --------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "shuffled"),
    [
        (DataLoader(Ids()), False),
        (DataLoader(Ids(), shuffle=True), True),
        (DataLoader(Ids(), sampler=SequentialSampler(Ids())), False),
        (DataLoader(Ids(), sampler=RandomSampler(Ids())), True),
        (DataLoader(Ids(), sampler=DistributedSampler(Ids(), 4, 1)), True),
        (DataLoader(Ids(), sampler=DistributedSampler(Ids(), 4, 1, shuffle=False)), False),
        (DataLoader(Ids(), batch_sampler=BatchSampler(RandomSampler(Ids()), 3, True)), True),
        (Ids(), True),
        (list(range(12)), True),
    ],
)
def test_sequential_stays_and_random_becomes_ours(loader: Any, shuffled: bool) -> None:
    source = train(loader)
    assert source.order == ("random" if shuffled else "sequential")
    assert order(source, drop_last=False) == sample_order(12, 0, 0, shuffled).tolist()
    assert order(source, evaluation=True) == list(range(12))


def test_config_may_say_shuffle() -> None:
    assert Source.of(DataLoader(Ids(), shuffle=True), "train_loader", shuffle=False).order == "sequential"
    assert Source.of(Ids(), "train_loader", shuffle=False).order == "sequential"
    assert Source.of(Ids(), "val_loader").order == "sequential"


def test_a_loader_keeps_what_it_says() -> None:
    init = partial(print, end="")
    collate = partial(default_collate)
    loader = DataLoader(
        Ids(), batch_size=5, num_workers=2, collate_fn=collate, worker_init_fn=init, pin_memory=True,
        prefetch_factor=3, persistent_workers=True, timeout=7, drop_last=True,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    source = train(loader)
    assert (source.dataset, source.batch_size, source.drop_last) == (loader.dataset, 5, True)
    assert source.collate_fn is collate
    rebuilt = Feed(source, 5)._dataloader(0)
    assert (rebuilt.dataset.dataset, rebuilt.dataset.collate_fn) == (loader.dataset, collate)
    assert rebuilt.worker_init_fn.args[0] is init
    for name in ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "timeout",
                 "multiprocessing_context"):  # fmt: skip
        assert getattr(rebuilt, name) == getattr(loader, name), name


def test_a_batch_sampler_of_torchs_own_gives_batch_size_and_drop_last() -> None:
    source = train(DataLoader(Ids(), batch_sampler=BatchSampler(SequentialSampler(Ids()), 5, True)))
    assert (source.batch_size, source.drop_last, source.order) == (5, True, "sequential")


# -- samplers of the user's own --------------------------------------------------------------


class Named(Sampler[Any]):
    """Draws keys that are no numbers, in an order from Python's generator."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        import random

        return iter(random.sample(self.keys, len(self.keys)))


class Keyed(Dataset[int]):
    def __init__(self, table: dict[Any, int]) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: Any) -> int:
        return self.table[key]


TABLE = {"a": 0, "b": 1, (2, 3): 2, (4, 5): 3, 6: 4}


@pytest.mark.parametrize(
    ("dataset", "sampler", "possible"),
    [
        (Ids(), SubsetRandomSampler(range(0, 12, 2)), set(range(0, 12, 2))),
        (Ids(), WeightedRandomSampler([1.0] * 6 + [0.0] * 6, 12), set(range(6))),
        (Ids(), RandomSampler(Ids(), replacement=True, num_samples=7), set(range(12))),
        (Keyed(TABLE), Named(list(TABLE)), set(range(5))),
    ],
)
def test_other_samplers_are_drawn_once_an_epoch_for_all_ranks(
    dataset: Any, sampler: Any, possible: set[int]
) -> None:
    source = train(DataLoader(dataset, sampler=sampler))
    calls: list[Any] = []

    def broadcast(value: Any) -> Any:
        calls.append(value)
        return value if value is not None else calls[0]

    torch.manual_seed(1)
    feeds = [Feed(source, 1, rank=rank, size=2, broadcast=broadcast) for rank in range(2)]
    rows = list(zip(*(feed.windows(0) for feed in feeds), strict=True))
    found = [int(micro.batch) for row in rows for window in row for micro in window.micro_batches
             if micro.num_samples]  # fmt: skip
    assert [value is None for value in calls] == [False, True]
    assert len(found) == len(sampler)
    assert set(found) <= possible
    torch.manual_seed(2)
    again = order(source)
    assert again == found
    assert order(source, 1) != found


def test_a_sampler_that_draws_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match="sampler draws no sample"):
        order(train(DataLoader(Ids(), sampler=Named([]))))


def test_every_epoch_is_announced_to_dataset_and_sampler() -> None:
    class Telling(Named):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    dataset, sampler = Ids(), Telling(list(range(12)))
    feed = Feed(train(DataLoader(dataset, sampler=sampler)), 4)
    list(feed.windows(3))
    assert (dataset.epoch, sampler.epoch) == (3, 3)


# -- data without a loader -------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        (torch.arange(6), torch.arange(6) * 2),
        [np.arange(6), np.arange(6) * 2],
        TensorDataset(torch.arange(6), torch.arange(6) * 2),
        [(i, i * 2) for i in range(6)],
        [(torch.tensor(i), i * 2) for i in range(6)],
    ],
)
def test_bare_data(data: Any) -> None:
    source = train(data)
    (window,) = Feed(source, 6).windows(0)
    x, y = window.micro_batches[0].batch
    assert x.tolist() == sample_order(6, 0, 0).tolist()
    assert torch.equal(y, x * 2)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "dataset is empty"),
        (DataLoader(Ids(0), batch_size=2), "dataset is empty"),
        ((torch.zeros(3), torch.zeros(4)), "differ in length"),
        ((torch.zeros(3), torch.tensor(1.0)), "differ in length"),
        (DataLoader(Ids(), batch_size=None), "yields complete batches"),
        (iter(range(3)), "not a readable data source"),
        (7, "not a readable data source"),
        ({"x": torch.zeros(3), "y": torch.zeros(3)}, "not a readable data source"),
        ("train.csv", "not a readable data source"),
        (NoLength(), "no length"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_data_that_cannot_be_read(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Source.of(data, "val_loader")
    assert caught.value.field == "val_loader"


class Rows(Dataset[dict[str, torch.Tensor]]):
    """What the remedy of a mapping of columns describes."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def test_the_remedy_of_a_mapping_of_columns_is_readable() -> None:
    columns = {"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)}
    with pytest.raises(UserError, match="not a readable data source: a mapping") as caught:
        Source.of(columns, "train_loader")
    assert caught.value.got == "dict with 'input_ids', 'labels'"
    assert "a Dataset with `__len__`" in str(caught.value.remedy)
    datasets = pytest.importorskip("datasets")
    for rows in (Rows(columns), datasets.Dataset.from_dict(columns).with_format("torch")):
        (window,) = Feed(train(rows), 4).windows(0)
        batch, chosen = window.micro_batches[0].batch, sample_order(4, 0, 0)
        assert {name: column.tolist() for name, column in batch.items()} == {
            name: column[chosen].tolist() for name, column in columns.items()
        }


# -- workers ---------------------------------------------------------------------------------


class Pids(Ids):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_over_two_epochs(persistent: bool) -> None:
    loader = DataLoader(Pids(), num_workers=2, persistent_workers=persistent, shuffle=True)
    feed = Feed(train(loader), 3)
    workers = []
    for epoch in range(2):
        batches = [window.micro_batches[0].batch for window in feed.windows(epoch)]
        assert torch.cat([ids for ids, _ in batches]).tolist() == sample_order(12, 0, epoch).tolist()
        workers.append({int(pid) for _, pids in batches for pid in pids})
    assert os.getpid() not in workers[0] | workers[1]
    assert (workers[0] == workers[1]) == persistent


# -- streams on real ranks -------------------------------------------------------------------


class OwnShard(IterableDataset[Tensor]):
    """Says that each rank's stream is its share: rank 0 holds 7 samples, rank 1 holds 3."""

    shards_itself = True

    def __iter__(self) -> Iterator[Tensor]:
        rank = int(os.environ["RANK"])
        yield from torch.arange(7) if rank == 0 else torch.arange(10, 13)


class Cells(nn.Module):
    """A weight per sample, so that a sample's use can be read off it."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(13, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.cells[index]


def read_cells(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def shards(pool: RankPool, **fields: Any) -> tuple[Trainer, Cells]:
    model = Cells()
    fields = {"optimizer": torch.optim.SGD, "learning_rate": 1.0, "training_step": read_cells, **fields}
    return make_trainer(model, 2, pool, **fields), model


# Windows of 2 samples a rank: (0 1 | 10 11), (2 3 | 12), (4 5 | -), (6 | -).
MOVED = [-1 / 4] * 2 + [-1 / 3] * 2 + [-1 / 2] * 2 + [-1.0] + [0.0] * 3 + [-1 / 4] * 2 + [-1 / 3]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_streams_of_unequal_length_that_shard_themselves(rank_pool: RankPool, accumulation: int) -> None:
    trainer, model = shards(rank_pool, gradient_accumulation_steps=accumulation)
    history = trainer.fit(DataLoader(OwnShard(), batch_size=2 // accumulation))
    assert model.cells.tolist() == pytest.approx(MOVED, abs=1e-12)
    assert history.num_samples == 10


@pytest.mark.parametrize("first", [1, 2, 3])
def test_such_a_stream_goes_on_where_each_rank_was(rank_pool: RankPool, first: int) -> None:
    trainer, model = shards(rank_pool)
    loader = DataLoader(OwnShard(), batch_size=2)
    trainer.fit(loader, max_steps=first)
    trainer.fit(loader, epochs=1)
    assert model.cells.tolist() == pytest.approx(MOVED, abs=1e-12)


def test_such_a_stream_may_drop_the_rest(rank_pool: RankPool) -> None:
    trainer, model = shards(rank_pool)
    history = trainer.fit(DataLoader(OwnShard(), batch_size=2, drop_last=True))
    assert history.num_samples == 8
    assert model.cells[[6, 12]].tolist() == [0.0, 0.0]


def test_a_rank_without_any_stream_is_an_error(rank_pool: RankPool) -> None:
    trainer, _ = shards(rank_pool)
    with pytest.raises(UserError, match="rank 1 got no sample"):
        trainer.fit(DataLoader(OnlyRankZero(), batch_size=2))


class OnlyRankZero(OwnShard):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(4) if os.environ["RANK"] == "0" else ())


def test_a_temporary_folder_whose_sockets_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers would print errors while the run waits for them."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 80)
    assert not train(DataLoader(Ids())).options.get("num_workers")
    with pytest.raises(UserError, match="TMPDIR: the path of a socket is too long: /xxx"):
        train(DataLoader(Ids(), num_workers=1))


def test_a_list_of_batches_is_named(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.ones(8, 3), torch.zeros(8)
    train(list(DataLoader(TensorDataset(x, y), batch_size=4)))
    assert "train_loader is a list whose elements look like batches" in caplog.text
    caplog.clear()
    train(list(zip(x, y, strict=True)))
    assert caplog.text == ""


def test_tables_and_arrays_of_objects_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(UserError, match="train_loader: a table is indexed by its columns"):
        train(pandas.DataFrame({"a": [1.0], "y": [0]}))
    with pytest.raises(UserError, match="train_loader: an array holds objects instead of numbers"):
        train((np.array([[1, "a"]], dtype=object), np.array([0])))
