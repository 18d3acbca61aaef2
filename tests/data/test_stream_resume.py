"""Iterable datasets go on exactly where they were: no sample missing, none twice, in the same order."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed import Trainer
from distributed.checkpoint.codec import decode, encode
from distributed.data import Feed, Source
from distributed.errors import UserError, WorkerError
from distributed.testing.rank_pool import RankPool
from tests.support.training import Die, make_trainer

LENGTH = 47


class Plain(IterableDataset[int]):
    """0, 1, 2, ...; notes what was read."""

    def __init__(self, read: list[int] | None = None) -> None:
        self.read = [] if read is None else read

    def __iter__(self) -> Iterator[int]:
        for sample in range(LENGTH):
            self.read.append(sample)
            yield sample


class Knows(Plain):
    """Begins at its place, once; as Hugging Face's IterableDataset does."""

    place, begin = 0, 0

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        for self.place in range(begin + 1, LENGTH + 1):
            self.read.append(self.place - 1)
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


class GoesOn(Knows):
    """Goes on from its place with every iterator, and begins anew at the end; as in torchdata."""

    def __iter__(self) -> Iterator[int]:
        while self.place < LENGTH:
            self.place += 1
            self.read.append(self.place - 1)
            yield self.place - 1
        self.place = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Shuffles(Knows):
    """Draws from a buffer at random, by the random numbers that the feed lends it."""

    buffer: list[int]

    def __init__(self, read: list[int] | None = None) -> None:
        super().__init__(read)
        self.buffer = []

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            self.buffer.append(sample)
            if len(self.buffer) == 5:
                yield self.buffer.pop(random.randrange(5))
        while self.buffer:
            yield self.buffer.pop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": self.buffer}  # alive, as careless ones are

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = state["buffer"]


class Place:
    """An iterator with a state of its own."""

    def __init__(self, read: list[int]) -> None:
        self.read, self.place = read, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.place == LENGTH:
            raise StopIteration
        self.read.append(self.place)
        self.place += 1
        return self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class ByIterator(Plain):
    def __iter__(self) -> Iterator[int]:
        return Place(self.read)


def feeds(kind: type[Plain], size: int, workers: int, reads: list[list[int]]) -> list[Feed]:
    """Every rank's feed of two samples a micro-batch; what each reads goes to `reads`."""
    ranks = []
    for rank in range(size):
        reads.append([])
        loader = DataLoader(kind(reads[-1]), batch_size=2, num_workers=workers)
        ranks.append(Feed(Source.of(loader, "train_loader"), 2, rank=rank, size=size, seed=3))
    return ranks


def windows(ranks: list[Feed], start: int, state: Any, limit: int | None) -> tuple[list[int], Any]:
    """(samples in the order of a single process, the state behind them that a checkpoint would hold)."""
    found: list[int] = []
    for feed in ranks:
        feed.restore(state)
    for count, row in enumerate(zip(*(feed.windows(2, start) for feed in ranks), strict=True), 1):
        for window in row:
            for batch, number in window.micro_batches:
                found += batch.tolist()[:number]
        states = [feed.state for feed in ranks]
        assert all(repr(s) == repr(states[0]) for s in states)
        if count == limit:
            ranks[0].ended(0)  # reads one window ahead
            break
    return found, decode(encode(ranks[0].state))


KINDS = [Plain, Knows, GoesOn, Shuffles, ByIterator]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 3), (3, 2), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_another_number_of_ranks_goes_on_at_the_next_sample(
    kind: type[Plain], sizes: tuple[int, ...], workers: int
) -> None:
    if workers and sizes != (2, 3):
        workers = 0  # one of them is enough: each starts processes
    expected, _ = windows(feeds(kind, 1, 0, []), 0, None, None)
    assert sorted(expected) == list(range(LENGTH))
    found: list[int] = []
    state: Any = None
    for number, size in enumerate(sizes):
        reads: list[list[int]] = []
        last = number == len(sizes) - 1
        more, state = windows(feeds(kind, size, workers, reads), len(found), state, None if last else 3)
        if number and kind is not Plain and not workers:
            assert all(read[0] >= len(found) for read in reads)  # what was read is not read again
        found += more
    assert found == expected


def test_what_is_read_ahead_does_not_move_the_state() -> None:
    (feed,) = feeds(Knows, 1, 0, [])
    reading = feed.windows(0, 0)
    next(iter(reading))
    before = feed.state["dataset"]
    assert not feed.ended(2)
    assert feed.state["dataset"] == before == {"place": 2}


class Random(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from (int.from_bytes(os.urandom(2), "little") for _ in range(LENGTH))


def test_a_stream_that_begins_otherwise_when_it_is_read_again_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for kind, told in ((Plain, 0), (Random, 1)):
        caplog.clear()
        _, state = windows(feeds(kind, 1, 0, []), 0, None, 3)
        with caplog.at_level(logging.WARNING, "distributed"):
            windows(feeds(kind, 1, 0, []), 6, state, 1)
        assert caplog.text.count("yielded another first sample") == told


def test_a_state_that_nothing_can_load_is_an_error() -> None:
    _, state = windows(feeds(Knows, 1, 0, []), 0, None, 3)
    with pytest.raises(UserError, match=r"train_loader: .*no load_state_dict.*'Plain'"):
        windows(feeds(Plain, 1, 0, []), 6, state, 1)


# -- runs that are killed --------------------------------------------------------------------------


class Cells(nn.Module):
    """A weight per sample: what it has moved by says how often the sample was used."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.cells[index]


def used(model: nn.Module, batch: Tensor) -> Tensor:
    """Sum and count, so that each use moves its cell by 1 / 6 in a global batch of 6."""
    return model(batch).mean()


class Share(Knows):
    """Each rank's stream is every n-th sample."""

    shards_itself = True

    def __iter__(self) -> Iterator[int]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return (sample for sample in super().__iter__() if sample % size == rank)


def trainer(folder: Path, ranks: int, pool: RankPool | None = None, **fields: Any) -> tuple[Trainer, Cells]:
    model = Cells()
    made = make_trainer(
        model, ranks, pool, folder=folder, optimizer=torch.optim.SGD, learning_rate=1.0, training_step=used,
        global_batch_size=6, checkpoint={"every_n_steps": 2, "asynchronous": False}, **fields,
    )  # fmt: skip
    return made, model


ONCE = [-1 / 6] * 42 + [-1 / 5] * 5
"""Cells of samples that were each used once; the last global batch holds the five that are left."""


@pytest.mark.parametrize(("before", "after", "kind"), [(2, 1, Knows), (2, 3, Plain), (3, 2, GoesOn)])
def test_a_run_killed_in_mid_epoch_uses_every_sample_once(
    before: int, after: int, kind: type[Plain], tmp_path: Path, rank_pool: RankPool,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    killed, _ = trainer(tmp_path, before, callbacks=[Die(5, rank=0)])  # the fourth was saved
    with pytest.raises(WorkerError):
        killed.fit(kind())
    resumed, model = trainer(tmp_path, after, rank_pool, resume_from_checkpoint=True)
    history = resumed.fit(kind())
    assert history.steps["step"] == [5, 6, 7, 8]
    assert model.cells.tolist() == pytest.approx(ONCE, abs=1e-12)
    again = "the stream cannot restore its position: reads 24 samples again"
    assert capfd.readouterr().out.count(again) == (1 if kind is Plain else 0)


@pytest.mark.parametrize("kind", [Knows, GoesOn])
def test_a_second_fit_goes_on_in_the_stream(kind: type[Plain], tmp_path: Path) -> None:
    made, model = trainer(tmp_path, 1)
    data = kind()
    made.fit(data, max_steps=3)
    made.fit(data, epochs=1)
    assert model.cells.tolist() == pytest.approx(ONCE, abs=1e-12)


def test_a_stream_that_shards_itself_goes_on_on_as_many_ranks_alone(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    first, _ = trainer(tmp_path, 2, rank_pool)
    first.fit(Share(), max_steps=4)
    other, _ = trainer(tmp_path, 3, rank_pool, resume_from_checkpoint=True)
    with pytest.raises(
        UserError, match="shards itself can be resumed mid-epoch only on the same number of ranks: 2 ranks"
    ):
        other.fit(Share())
    same, model = trainer(tmp_path, 2, rank_pool, resume_from_checkpoint=True)
    same.fit(Share())
    assert [round(-1 / cell) for cell in model.cells.tolist()] == [6] * 42 + [5] * 5
