"""Samplers with an order of their own, trained on ranks over several epochs, fits and restarts."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    TensorDataset,
    default_collate,
)

from distributed import Callback, UserError
from distributed.data import Feed, Source
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.data.test_loaders_on_ranks import (
    DATA,
    EXACT,
    NUM,
    Curriculum,
    X,
    Y,
    distance,
    linear,
    plain,
    trainer,
)

PLACES = [
    ("serial", 1, {}),
    ("pytorch-ddp", 3, {}),
    ("fsdp", 2, {}),
    ("deepspeed", 2, {"zero_stage": 1}),
]
everywhere = pytest.mark.parametrize(
    ("backend", "ranks", "fields"), PLACES, ids=[f"{name}-{ranks}" for name, ranks, _ in PLACES]
)


class Shuffled(Sampler[int]):
    """Shuffles with a generator of its own, which moves on in each epoch."""

    def __init__(self, seed: int = 3) -> None:
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(NUM), NUM))


def batches_of(*samplers: Any, size: int = 6) -> list[list[int]]:
    """Global batches of an epoch of each."""
    orders = [list(sampler) for sampler in samplers]
    return [order[k : k + size] for order in orders for k in range(0, NUM, size)]


def loader(sampler: Any, size: int = 6) -> DataLoader[Any]:
    return DataLoader(DATA, size, sampler=sampler)  # type: ignore[arg-type]


@everywhere
def test_fits_one_after_another_continue_the_order(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    """The second one begins within an epoch; so does the third, which ends it."""
    model, data = linear(), loader(Shuffled())
    run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=6, max_steps=3, **fields)
    for _ in range(3):
        run.fit(data)
    own = Shuffled()
    assert distance(model, plain(batches_of(own, own, own)[:9])) < EXACT


@everywhere
def test_another_loader_begins_its_own_order(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    model = linear()
    run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=6, epochs=1, **fields)
    run.fit(loader(Shuffled(3)))
    run.fit(loader(Shuffled(4)))
    assert distance(model, plain(batches_of(Shuffled(3), Shuffled(4)))) < EXACT


@everywhere
def test_a_run_that_is_stopped_continues_the_order(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    options = {"backend": backend, "global_batch_size": 6, "checkpoint_dir": tmp_path, **fields}
    trainer(linear(), rank_pool, ranks, epochs=3, max_steps=6, **options).fit(loader(Shuffled()))
    model = linear()
    trainer(model, rank_pool, ranks, epochs=3, resume_from_checkpoint=True, **options).fit(loader(Shuffled()))
    own = Shuffled()
    assert distance(model, plain(batches_of(own, own, own))) < EXACT


class Endless(Shuffled):
    def __len__(self) -> int:
        raise ValueError("it has no end")

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


@everywhere
def test_a_sampler_without_an_end(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    options = {"backend": backend, "global_batch_size": 6, "deterministic": True, **fields}
    with pytest.raises(UserError, match="its sampler has no end, and with it the first epoch") as caught:
        trainer(linear(), rank_pool, ranks, **options).fit(loader(Endless()))
    assert caught.value.remedy == "Set max_steps, or give the sampler an end"
    options["checkpoint_dir"] = tmp_path
    trainer(linear(), rank_pool, ranks, max_steps=3, **options).fit(loader(Endless()))
    model = linear()
    trainer(model, rank_pool, ranks, max_steps=9, resume_from_checkpoint=True, **options).fit(
        loader(Endless())
    )
    own = Shuffled()
    assert distance(model, plain(batches_of(own, own, own)[:9])) < EXACT


class OfEpoch(Sampler[int]):
    """Shuffles by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(NUM), NUM))


class Wrapped(Sampler[int]):
    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return reversed(list(self.inner))


class Grouped(BatchSampler):
    """A batch sampler of another class, whose batches stay whole."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batches", [False, True], ids=["sampler", "batch_sampler"])
def test_set_epoch_reaches_a_sampler_within_others(batches: bool, ranks: int, rank_pool: RankPool) -> None:
    def order(epoch: int) -> list[int]:
        return random.Random(epoch).sample(range(NUM), NUM)[::-1]

    sampler, size = Wrapped(OfEpoch()), 6 // ranks
    whole = DataLoader(DATA, batch_sampler=Grouped(sampler, size, False))  # type: ignore[arg-type]
    data = whole if batches else loader(sampler, size)
    model = linear()
    backend = "serial" if ranks == 1 else "pytorch-ddp"
    trainer(model, rank_pool, ranks, backend=backend, epochs=2).fit(data)
    assert distance(model, plain(batches_of(order(0), order(1)))) < EXACT


# -- batches of other kinds ------------------------------------------------------------------------


class Graph:
    """A sample or batch whose class no library knows."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, **_: Any) -> Graph:
        return Graph(self.x.to(device), self.y.to(device))


class NoisyGraphs(Dataset[Any]):
    def __init__(self, own: bool = False) -> None:
        self.random: Any = random.Random(0) if own else random

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Graph:
        x, y = DATA[index]
        return Graph(x + self.random.random(), y)


def joined(samples: Sequence[Graph]) -> Graph:
    return Graph(*default_collate([(sample.x, sample.y) for sample in samples]))


def of_graphs(model: Any, batch: Graph) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch.x), batch.y)


def test_objects_with_random_numbers_of_their_own_are_compared(tmp_path: Path) -> None:
    def run(own: bool, **given: Any) -> Any:
        model = linear()
        data = DataLoader(NoisyGraphs(own), 4, collate_fn=joined)
        fields = {"backend": "serial", "deterministic": True, "epochs": 2, "loss_fn": None, **given}
        trainer(model, None, 1, training_step=of_graphs, **fields).fit(data)
        return model

    whole = run(own=False)
    run(own=False, max_steps=8, checkpoint_dir=tmp_path / "a")
    assert distance(run(own=False, checkpoint_dir=tmp_path / "a", resume_from_checkpoint=True), whole) == 0
    run(own=True, max_steps=8, checkpoint_dir=tmp_path / "b")
    with pytest.raises(UserError, match="generator of their own"):
        run(own=True, checkpoint_dir=tmp_path / "b", resume_from_checkpoint=True)


class CountsCalls:
    """A collate function with another scale in every fourth batch."""

    calls = 0

    def __call__(self, samples: Sequence[Graph]) -> Graph:
        self.calls += 1
        batch = joined(samples)
        return Graph(batch.x * (2.0 if self.calls % 4 == 0 else 1.0), batch.y)


def test_a_collate_function_that_counts_its_calls_is_refused(tmp_path: Path) -> None:
    def run(deterministic: bool, **given: Any) -> Any:
        data = DataLoader(NoisyGraphs(), 4, collate_fn=CountsCalls())
        fields = {"backend": "serial", "deterministic": deterministic, "loss_fn": None, **given}
        own = trainer(linear(), None, 1, training_step=of_graphs, checkpoint_dir=tmp_path, **fields)
        return own.fit(data)

    run(True, max_steps=2)
    with pytest.raises(UserError, match="depend on how often they were called") as caught:
        run(True, resume_from_checkpoint=True)
    assert "set deterministic=false" in str(caught.value.remedy)
    assert len(run(False, resume_from_checkpoint=True).steps["loss"]) == NUM // 4 - 2


@dataclass
class Half(IterableDataset[Any]):
    """Every second sample, on the rank whose turn it is."""

    shards_itself = True

    def __iter__(self) -> Iterator[Any]:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        yield from DATA[rank::size]


def test_a_stream_that_shards_itself_beside_a_global_batch(rank_pool: RankPool) -> None:
    model = linear()
    run = trainer(model, rank_pool, 2, backend="pytorch-ddp", global_batch_size=8)
    run.fit(DataLoader(Half(), batch_size=16))
    windows = [[*range(k, k + 8)] for k in range(0, NUM, 8)]
    assert distance(model, plain(windows)) < EXACT


# -- found in public reports -----------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(12)),
        DistributedSampler(range(12), num_replicas=1, rank=0, shuffle=False),  # type: ignore[arg-type]
    ],
    ids=["sequential", "distributed"],
)
def test_a_sampler_of_other_data_draws_its_own_indices(
    sampler: Any, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    model = linear()
    trainer(model, rank_pool, ranks, backend=backend, global_batch_size=6, **fields).fit(loader(sampler))
    assert distance(model, plain([range(6), range(6, 12)])) < EXACT


def test_a_random_sampler_of_other_data_draws_from_its_own() -> None:
    source = Source.of(loader(RandomSampler(range(12))), "train_loader")
    (window,) = Feed(source, 12, seed=3).windows(0)
    assert len(window.micro_batches[0].batch[0]) == 12


class Negatives(Curriculum):
    """Draws what belongs to its samples for each epoch, from generators of the process."""

    def set_epoch(self, epoch: int) -> None:
        self.drawn = np.random.permutation(NUM).tolist()
        assert len(self.drawn) == NUM

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return DATA[self.drawn[index]]


@everywhere
@pytest.mark.parametrize("workers", [0, 2])
def test_what_set_epoch_draws_is_the_same_on_all_ranks(
    workers: int, backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    """An epoch as one batch holds every sample once, so that the order does not matter."""
    model = linear()
    run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=NUM, epochs=2, **fields)
    run.fit(DataLoader(Negatives(), NUM, num_workers=workers, persistent_workers=workers > 0))
    assert distance(model, plain([range(NUM), range(NUM)])) < EXACT


class Shard(IterableDataset[Any]):
    """As transformers' IterableDatasetShard."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes

    def __iter__(self) -> Iterator[Any]:
        yield from DATA[:: self.num_processes]


def test_a_stream_made_for_one_of_several_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="made for one of 2 ranks yields a part of the data") as caught:
        trainer(linear(), None, 1, backend="serial").fit(DataLoader(Shard(2), 4))
    assert (
        caught.value.remedy
        == "Make it for a world of one (num_processes=1), as its rank 0: each rank gets its part"
    )
    model = linear()
    trainer(model, None, 1, backend="serial").fit(DataLoader(Shard(1), 4))
    assert distance(model, plain([range(k, k + 4) for k in range(0, NUM, 4)])) < EXACT


class MadeInSetEpoch(Sampler[list[int]]):
    """Batches that exist once the epoch is known."""

    def set_epoch(self, epoch: int) -> None:
        order = random.Random(epoch).sample(range(NUM), NUM)
        self.batches = [order[k : k + 6] for k in range(0, NUM, 6)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def test_batches_that_are_made_in_set_epoch() -> None:
    model = linear()
    data = DataLoader(DATA, batch_sampler=MadeInSetEpoch())  # type: ignore[arg-type]
    trainer(model, None, 1, backend="serial", epochs=2).fit(data)
    orders = [random.Random(epoch).sample(range(NUM), NUM) for epoch in range(2)]
    assert distance(model, plain(batches_of(*orders))) < EXACT


class Counting(IterableDataset[Any]):
    """Counts its epochs, and shuffles by them."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.epoch).sample(range(NUM), NUM)
        self.epoch += 1
        yield from (DATA[row] for row in order)


@pytest.mark.parametrize(
    ("stop", "deterministic", "place"),
    [
        (4, False, 0),
        (4, True, 1),
        (6, False, 0),
        (6, True, 1),
        (6, False, 2),
        (6, False, 3),
        (8, False, 0),
        (8, True, 1),
    ],
)
def test_a_stream_that_counts_its_epochs_continues(
    stop: int,
    deterministic: bool,
    place: int,
    rank_pool: RankPool,
    tmp_path: Path,
) -> None:
    backend, ranks, fields = PLACES[place]
    options = {"backend": backend, "global_batch_size": 6, "epochs": 3, "checkpoint_dir": tmp_path, **fields}
    options["deterministic"] = deterministic
    trainer(linear(), rank_pool, ranks, max_steps=stop, **options).fit(DataLoader(Counting(), 6))
    model = linear()
    trainer(model, rank_pool, ranks, resume_from_checkpoint=True, **options).fit(DataLoader(Counting(), 6))
    orders = [random.Random(epoch).sample(range(NUM), NUM) for epoch in range(3)]
    assert distance(model, plain(batches_of(*orders))) < EXACT


class Learning(Shuffled):
    """Orders samples by what the training step of this rank has noted."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(NUM), key=self.seen.count))


class Notes(Callback):
    def __init__(self, sampler: Learning, shares: bool = False, all_ranks: bool = True) -> None:
        self.sampler, self.shares, self.all_ranks = sampler, shares, all_ranks  # type: ignore[misc]

    def on_step_end(self, context: Context) -> None:
        own = [context.world.rank * 3]
        parts = context.backend.gather_objects(own) if self.shares else [own]
        self.sampler.seen += [row for part in parts for row in part]


def test_a_sampler_that_each_rank_changes_by_itself_is_refused(rank_pool: RankPool) -> None:
    def run(**how: Any) -> nn.Module:
        sampler, model = Learning(), linear()
        fields = {"backend": "pytorch-ddp", "global_batch_size": 6, "epochs": 3}
        own = trainer(model, rank_pool, 2, callbacks=[Notes(sampler, **how)], **fields)
        own.fit(loader(sampler))
        return model

    with pytest.raises(
        UserError, match="draw different samples in epoch 1, and the same before it"
    ) as caught:
        run()
    assert "all_gather_object" in (caught.value.remedy or "")
    for seen, how in (([0, 3], {"shares": True}), ([0], {"all_ranks": False})):
        order = sorted(range(NUM), key=seen.count)
        assert distance(run(**how), plain(batches_of(range(NUM), order, order))) < EXACT


class ShardOfRank(Sampler[int]):
    """The part of the rank whose environment it reads."""

    def __len__(self) -> int:
        return len(list(self))

    def __iter__(self) -> Iterator[int]:
        rank, ranks = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        return iter(range(rank, NUM, ranks or 2))


class OfRank(Sampler[int]):
    _rank, _world_size = 0, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._rank, NUM, self._world_size))


def test_a_private_number_of_ranks_is_seen() -> None:
    with pytest.raises(UserError, match="made for one of 2 ranks") as caught:
        trainer(linear(), None, 1, backend="serial").fit(loader(OfRank()))
    assert "_world_size=1" in str(caught.value.remedy)


class SomeOf(Sampler[int]):
    """States the length of the data, and draws a half; from the end."""

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return iter(range(-1, -13, -1))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_sampler_draws_fewer_than_it_states_and_from_the_end(in_memory: bool, rank_pool: RankPool) -> None:
    data: Any = TensorDataset(X, Y) if in_memory else DATA
    model, half = linear(), DataLoader(data, 6, sampler=SomeOf())
    run = trainer(model, rank_pool, 2, backend="pytorch-ddp", global_batch_size=6)
    history = run.fit(half, half)
    expected = plain([range(23, 17, -1), range(17, 11, -1)])
    assert distance(model, expected) < EXACT
    loss = nn.functional.mse_loss(expected(X[12:]), Y[12:]).item()
    assert history.epochs[0]["val_loss"] == pytest.approx(loss, abs=EXACT)


class Reshuffled(Curriculum):
    """Each epoch shuffles the order of the one before."""

    def __init__(self) -> None:
        self.rows, self.random = list(range(NUM)), random.Random(3)

    def set_epoch(self, epoch: int) -> None:
        self.random.shuffle(self.rows)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return DATA[self.rows[index]]


@pytest.mark.parametrize(
    ("stop", "ranks", "deterministic", "sampler"),
    [
        (6, 1, False, None),
        (8, 3, False, Shuffled),
        (6, 3, True, Shuffled),
        (8, 1, True, Shuffled),
        (8, 3, True, None),
    ],
)
def test_a_dataset_with_a_history_of_epochs_continues(
    sampler: Any, deterministic: bool, ranks: int, stop: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(Reshuffled(), 6, sampler=sampler and sampler())

    options = {"backend": "serial" if ranks == 1 else "pytorch-ddp", "global_batch_size": 6, "epochs": 3}
    options |= {"checkpoint_dir": tmp_path, "deterministic": deterministic}
    trainer(linear(), rank_pool, ranks, max_steps=stop, **options).fit(data())
    model = linear()
    trainer(model, rank_pool, ranks, resume_from_checkpoint=True, **options).fit(data())
    rows, own = list(range(NUM)), random.Random(3)
    orders, drawn = [], sampler and sampler()
    for _ in range(3):
        own.shuffle(rows)
        orders.append([rows[k] for k in order] if (order := list(drawn or [])) else [*rows])
    assert distance(model, plain(batches_of(*orders))) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_loader_follows_whole_epochs_and_not_a_part_of_one(ranks: int, rank_pool: RankPool) -> None:
    model = linear()
    place = "serial" if ranks == 1 else "pytorch-ddp"
    run = trainer(model, rank_pool, ranks, backend=place, deterministic=True, global_batch_size=6)
    run.fit(loader(Shuffled(3)), epochs=2)
    run.fit(loader(Shuffled(4)), epochs=1)
    first, second = Shuffled(3), Shuffled(4)
    assert distance(model, plain(batches_of(first, first, second))) < EXACT
    run.fit(loader(Shuffled(4)), max_steps=1)
    with pytest.raises(UserError, match="than that of the fit before") as caught:
        run.fit(loader(Shuffled(5)), epochs=1)
    assert str(caught.value.remedy).startswith("End the epoch with that loader")


def test_a_loader_with_a_state_is_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    begun = StatefulDataLoader(DATA, 6)  # type: ignore[arg-type]
    next(iter(begun))
    data = StatefulDataLoader(DATA, 6)  # type: ignore[arg-type]
    data.load_state_dict(begun.state_dict())
    with pytest.raises(UserError, match="the state that was loaded into the loader would be ignored"):
        trainer(linear(), None, 1, backend="serial").fit(data)
    model = linear()
    trainer(model, None, 1, backend="serial").fit(StatefulDataLoader(DATA, 6))  # type: ignore[arg-type]
    assert distance(model, plain(batches_of(range(NUM)))) < EXACT


class InBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for k in range(0, NUM, 6):
            yield [X[k : k + 6], Y[k : k + 6]]


def test_a_stream_of_batches_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer(linear(), None, 1, backend="serial", batch_size=2).fit(InBatches())
    assert "InBatches yields what looks like batches" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_fits_within_an_epoch_tell_it_once(ranks: int, rank_pool: RankPool) -> None:
    model, data = linear(), DataLoader(Reshuffled(), 6)
    backend = "serial" if ranks == 1 else "pytorch-ddp"
    run = trainer(model, rank_pool, ranks, backend=backend, global_batch_size=6)
    run.fit(data, max_steps=2)
    run.fit(data, max_steps=2)
    rows = list(range(NUM))
    random.Random(3).shuffle(rows)
    assert distance(model, plain(batches_of(rows))) < EXACT


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_refused_after_another_sampler_too(ranks: int, rank_pool: RankPool) -> None:
    run = trainer(linear(), rank_pool, ranks, backend="pytorch-ddp", global_batch_size=6)
    run.fit(loader(Shuffled()), epochs=1)
    with pytest.raises(UserError, match="another part of the data on each rank"):
        run.fit(loader(ShardOfRank()), epochs=1)


def test_a_checkpoint_that_is_named_is_no_earlier_fit(tmp_path: Path) -> None:
    options = {"backend": "serial", "deterministic": True, "checkpoint_dir": tmp_path, "epochs": 2}
    saved = trainer(linear(), None, 1, max_steps=4, **options).fit(loader(Shuffled(3))).checkpoint
    with pytest.raises(UserError, match="than before the checkpoint was saved"):
        trainer(linear(), None, 1, resume_from_checkpoint=saved, **options).fit(loader(Shuffled(4)))


@pytest.mark.parametrize(("backend", "ranks", "fields"), [PLACES[1], PLACES[2]], ids=["pytorch-ddp", "fsdp"])
def test_validation_keeps_batches_of_one(
    backend: str, ranks: int, fields: dict[str, Any], rank_pool: RankPool
) -> None:
    """Samples of different sizes cannot be stacked."""
    ragged = [(torch.ones(k + 1, 3, dtype=torch.float64), torch.ones(k + 1, 1)) for k in range(3)]
    run = trainer(
        linear(), rank_pool, ranks, backend=backend, batch_size=6, validation_step=rows_of, **fields
    )
    history = run.fit(loader(range(6)), DataLoader(ragged, 1))  # type: ignore[arg-type]
    assert history.epochs[0]["val_rows"] == 2.0


def rows_of(model: Any, batch: Any) -> dict[str, Any]:
    (x,) = batch[0]
    model(x)
    return {"rows": (len(x), 1)}
