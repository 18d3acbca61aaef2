"""Order, sharding and cursor (C3, C4), by the published order: no process is started here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from distributed.data import Feed, Source, split_window
from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.testing.oracle import sample_order

sizes = st.integers(1, 6)
accumulations = st.integers(1, 4)
batch_sizes = st.integers(1, 5)
lengths = st.integers(1, 60)
quick = settings(deadline=None, max_examples=60, derandomize=True)


def feeds(
    source: Source, batch_size: int, accumulation: int = 1, size: int = 1, **options: Any
) -> list[Feed]:
    """Every rank's feed. Rank 0 is always asked first, so its object is there for the others."""
    box: list[Any] = []

    def broadcast(value: Any) -> Any:
        box.extend([] if value is None else [value])
        return box[-1]

    return [
        Feed(source, batch_size, accumulation, rank=rank, size=size, broadcast=broadcast, **options)
        for rank in range(size)
    ]


def read(ranks: list[Feed], epoch: int = 0, start: int = 0, limit: int | None = None) -> list[list[int]]:
    """Per window the samples of all ranks one after another, having checked that ranks agree."""
    windows = []
    for row in zip(*(feed.windows(epoch, start) for feed in ranks), strict=True):
        windows.append(samples_of(row))
        if limit is not None and len(windows) == limit:
            break
    return windows


def samples_of(row: tuple[Window, ...]) -> list[int]:
    assert len({len(window.micro_batches) for window in row}) == 1
    found: list[int] = []
    for window in row:
        for batch, count in window.micro_batches:
            ids = (batch[0] if isinstance(batch, list) else batch).tolist()
            assert len(ids) == (count or len(ids)) > 0
            found += ids[:count]
    assert {window.num_samples for window in row} == {len(found)}
    return found


def flat(windows: list[list[int]]) -> list[int]:
    return [sample for window in windows for sample in window]


def tensors(length: int) -> Source:
    return Source.of(torch.arange(length), "train_loader")


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Ids(Dataset[int]):
    """Sample i is i. Not a TensorDataset, so it goes through a DataLoader."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


# -- order ---------------------------------------------------------------------------------


@quick
@given(lengths, batch_sizes, accumulations, sizes, st.integers(0, 9), st.integers(0, 3))
def test_the_ranks_one_after_another_are_the_single_process(
    length: int, batch_size: int, accumulation: int, size: int, seed: int, epoch: int
) -> None:
    windows = read(feeds(tensors(length), batch_size, accumulation, size, seed=seed), epoch)
    step = batch_size * accumulation * size
    expected = sample_order(length, seed, epoch).tolist()
    assert windows == [expected[start : start + step] for start in range(0, length, step)]


def test_order_depends_on_seed_and_epoch() -> None:
    found = {
        tuple(flat(read(feeds(tensors(20), 4, seed=seed), epoch))) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(found) == 4


@quick
@given(lengths, batch_sizes, sizes)
def test_shares_are_contiguous_and_differ_by_one_sample(length: int, batch_size: int, size: int) -> None:
    spans = [split_window(length, rank, size, batch_size) for rank in range(size)]
    assert [i for rank in spans for a, b in rank for i in range(a, b)] == list(range(length))
    totals = [sum(b - a for a, b in rank) for rank in spans]
    assert max(totals) - min(totals) <= 1
    assert totals == sorted(totals, reverse=True)
    assert all(b - a <= batch_size for rank in spans for a, b in rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_drop_last_drops_the_smaller_global_batch_alone(size: int) -> None:
    ranks = feeds(tensors(25), 2, 2, size, drop_last=True)
    whole = 25 // (4 * size) * (4 * size)
    assert flat(read(ranks)) == sample_order(25, 0, 0).tolist()[:whole]
    assert ranks[0].num_samples == whole
    assert ranks[0].num_windows == whole // (4 * size)
    evaluation = feeds(tensors(25), 2, 1, size, drop_last=True, evaluation=True)
    assert flat(read(evaluation)) == list(range(25))


# -- cursor --------------------------------------------------------------------------------

parts = st.lists(st.tuples(sizes, batch_sizes, accumulations, st.integers(1, 3)), min_size=1, max_size=4)


def read_in_parts(source: Source, plan: list[tuple[int, int, int, int]], **options: Any) -> list[int]:
    """An epoch read by changing numbers of ranks; the last of them reads to the end."""
    found: list[int] = []
    for number, (size, batch_size, accumulation, limit) in enumerate(plan):
        last = number == len(plan) - 1
        ranks = feeds(source, batch_size, accumulation, size, **options)
        found += flat(read(ranks, start=len(found), limit=None if last else limit))
    return found


@quick
@given(lengths, parts)
def test_ranks_may_change_in_mid_epoch(length: int, plan: list[tuple[int, int, int, int]]) -> None:
    assert read_in_parts(tensors(length), plan) == sample_order(length, 0, 0).tolist()


@quick
@given(lengths, parts)
def test_a_stream_goes_on_by_skipping(length: int, plan: list[tuple[int, int, int, int]]) -> None:
    source = Source.of(Stream(length), "train_loader")
    assert read_in_parts(source, plan) == list(range(length))


@quick
@given(lengths, parts)
def test_a_users_batches_are_neither_repeated_nor_lost(
    length: int, plan: list[tuple[int, int, int, int]]
) -> None:
    batches = BatchSampler(SequentialSampler(Ids(length)), 3, False)
    source = Source.of(DataLoader(Ids(length), batch_sampler=Pairs(batches)), "train_loader")
    assert source.order == "batch_sampler"
    assert read_in_parts(source, [(size, 1, acc, limit) for size, _, acc, limit in plan]) == list(
        range(length)
    )


class Pairs:
    """A batch sampler of the user's own kind."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.inner)


def test_a_users_batches_stay_whole() -> None:
    drawn = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    source = Source.of(DataLoader(Ids(11), batch_sampler=Pairs(drawn)), "train_loader")
    rows = list(zip(*(feed.windows(0) for feed in feeds(source, 1, 1, 2)), strict=True))
    seen = [[(window.micro_batches[0].batch.tolist(), window.micro_batches[0].num_samples) for window in row]
            for row in rows]  # fmt: skip
    assert seen[:2] == [[([0, 1, 2], 3), ([3], 1)], [([4, 5], 2), ([6, 7, 8, 9], 4)]]
    assert seen[2][0] == ([10], 1)
    assert seen[2][1][1] == 0
    assert [row[0].num_samples for row in rows] == [4, 6, 1]


# -- paths that must agree -----------------------------------------------------------------


@quick
@given(lengths, batch_sizes, accumulations, sizes, st.integers(0, 20))
def test_tensors_in_memory_read_as_through_a_loader(
    length: int, batch_size: int, accumulation: int, size: int, start: int
) -> None:
    data = TensorDataset(torch.arange(length), torch.arange(length) * 0.5)
    fast = Source.of(data, "train_loader")
    slow = Source.of(data, "train_loader")
    slow.collate_fn = lambda samples: torch.utils.data.default_collate(samples)
    assert fast.tensors is not None
    assert slow.tensors is None
    for a, b in zip(feeds(fast, batch_size, accumulation, size), feeds(slow, batch_size, accumulation, size),
                    strict=True):  # fmt: skip
        for one, two in zip(a.windows(1, start), b.windows(1, start), strict=True):
            assert one.num_samples == two.num_samples
            for micro, other in zip(one.micro_batches, two.micro_batches, strict=True):
                assert micro.num_samples == other.num_samples
                assert type(micro.batch) is type(other.batch)
                assert all(torch.equal(p, q) for p, q in zip(micro.batch, other.batch, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_is_dealt_out_sample_by_sample(workers: int, size: int) -> None:
    source = Source.of(DataLoader(Stream(23), batch_size=2, num_workers=workers), "train_loader")
    windows = read(feeds(source, 2, 2, size))
    step = 4 * size
    assert windows == [list(range(23))[start : start + step] for start in range(0, 23, step)]


class Shuffled(IterableDataset[int]):
    """Draws its order from the global generators, as shuffle buffers do."""

    shards_itself = False

    def __iter__(self) -> Iterator[int]:
        for start in range(0, 24, 8):
            block = list(range(start, start + 8))
            random.shuffle(block)
            order = np.random.permutation(8)
            for index in torch.randperm(8).tolist():
                yield block[order[index]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_shuffles_is_the_same_on_every_rank(workers: int) -> None:
    source = Source.of(DataLoader(Shuffled(), batch_size=2, num_workers=workers), "train_loader")
    found = []
    for size in (1, 2, 3):
        ranks = feeds(source, 2, 1, size)
        rows = []
        for feed in ranks:
            # Ranks seed their own streams differently.
            seed_all(feed.rank)
            rows.append(list(feed.windows(0)))
        found.append(flat([samples_of(row) for row in zip(*rows, strict=True)]))
    assert sorted(found[0]) == list(range(24))
    assert found[0] != list(range(24))
    assert found[0] == found[1] == found[2]
    torch.manual_seed(5)
    assert flat(read(feeds(source, 2, 1, 2), 0, start=12)) == found[0][12:]
    assert flat(read(feeds(source, 2), 1)) != found[0]


def test_reading_a_stream_leaves_the_models_random_numbers_alone() -> None:
    (feed,) = feeds(Source.of(Shuffled(), "train_loader"), 2)
    seed_all(3)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    seed_all(3)
    windows = feed.windows(0)
    assert next(windows) is not next(windows)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


# -- augmentation --------------------------------------------------------------------------


class Noisy(Dataset[tuple[int, Tensor]]):
    """Draws from all three generators for every sample."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        return index, torch.tensor(noise, dtype=torch.float64)


def noise_of(source: Source, size: int, epoch: int = 0) -> dict[int, tuple[float, ...]]:
    found = {}
    for feed in feeds(source, 2, 1, size, per_sample_rng=True):
        for window in feed.windows(epoch):
            for (ids, noise), count in window.micro_batches:
                found.update(zip(ids[:count].tolist(), map(tuple, noise[:count].tolist()), strict=True))
    return found


def test_augmentation_belongs_to_the_sample() -> None:
    found = [
        noise_of(Source.of(DataLoader(Noisy(), num_workers=workers, shuffle=True), "train_loader"), size)
        for size, workers in [(1, 0), (3, 0), (2, 2)]
    ]
    assert len(set(found[0].values())) == 13
    assert found[0] == found[1] == found[2]
    other = noise_of(Source.of(Noisy(), "train_loader"), 1, epoch=1)
    assert all(other[index] != found[0][index] for index in other)


def test_augmentation_leaves_other_random_numbers_alone() -> None:
    seed_all(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    noise_of(Source.of(Noisy(), "train_loader"), 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_a_stream_has_no_index_to_tie_randomness_to() -> None:
    with pytest.raises(UserError, match="iterable dataset has no sample index"):
        read(feeds(Source.of(Stream(4), "train_loader"), 2, per_sample_rng=True))
