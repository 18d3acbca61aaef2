"""Streams with which a run would train something else: split by rank, of another length, without position."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed.checkpoint.codec import decode, encode
from distributed.data import Feed, Source
from distributed.data.fingerprint import fingerprint
from distributed.data.stream import is_stateful
from distributed.errors import UserError
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

LENGTH = 20


class Numbers(IterableDataset[int]):
    """0, 1, 2, ... on every rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class ByRank(Numbers):
    """Every n-th sample, as after webdataset's split_by_node, without declaring it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), LENGTH, int(os.environ["WORLD_SIZE"])))


class Declared(ByRank):
    shards_itself = True


class OnRankZero(Numbers):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH) if os.environ["RANK"] == "0" else ())


class Cells(nn.Module):
    """A weight per sample: what it has moved by says how often the sample was used."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.cells[index]


def used(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def never(model: nn.Module, batch: Tensor) -> Tensor:
    raise AssertionError("a batch was trained")


def measured(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    return {"sum": (batch.sum(), len(batch))}


def train(pool: RankPool | None, loader: Any, *val: Any, ranks: int = 2, **fields: Any) -> list[float]:
    """The cells after an epoch of SGD with rate 1."""
    model = Cells()
    given = {"training_step": used, "validation_step": measured, "optimizer": torch.optim.SGD, **fields}
    make_trainer(model, ranks, pool, learning_rate=1.0, **given).fit(loader, *val)
    return model.cells.tolist()


# -- streams that shard themselves -----------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [ByRank, OnRankZero])
def test_a_stream_of_one_ranks_samples_is_refused_before_the_first_step(
    kind: type[Numbers], workers: int, rank_pool: RankPool
) -> None:
    loader = DataLoader(kind(), batch_size=2, num_workers=workers)
    with pytest.raises(UserError, match="read different samples") as caught:
        train(rank_pool, loader, training_step=never)
    assert caught.value.field == "train_loader"
    text = str(caught.value)
    assert f"'{kind.__name__}, whose first samples on 1 of 2 ranks (first: rank 1) are not those" in text
    assert "set shards_itself = True on the dataset" in text
    assert "nodesplitter=None" in text


def test_such_a_stream_is_refused_for_validation(rank_pool: RankPool) -> None:
    with pytest.raises(UserError, match="read different samples") as caught:
        train(rank_pool, DataLoader(Numbers(), batch_size=2), DataLoader(ByRank(), batch_size=2))
    assert caught.value.field == "val_loader"


@pytest.mark.parametrize("kind", [Numbers, Declared])
def test_every_sample_is_used_once_where_it_is_declared_or_not_split(
    kind: type[Numbers], rank_pool: RankPool
) -> None:
    assert train(rank_pool, DataLoader(kind(), batch_size=2), Numbers()) == [-1 / 4] * LENGTH


def test_the_comparison_can_be_left_out(rank_pool: RankPool) -> None:
    found = train(rank_pool, DataLoader(ByRank(), batch_size=2), data={"verify": False})
    assert sum(cell == 0.0 for cell in found) == LENGTH // 2  # what the comparison is there to refuse


def test_ranks_are_compared_once_an_epoch_at_the_first_window() -> None:
    for epoch, start in ((0, 0), (1, 8)):
        calls: list[str] = []

        def gather(value: str, calls: list[str] = calls) -> list[str]:
            calls.append(value)
            return [value, value]

        source = Source.of(DataLoader(Numbers(), batch_size=2), "train_loader")
        feed = Feed(source, 2, rank=0, size=2, gather=gather)
        windows = feed.windows(epoch, start)
        assert calls == []
        assert [w.num_samples for w in windows] == [4] * ((LENGTH - start) // 4)
        assert calls == [f"4 {fingerprint(range(start, start + 4))}"]


class Node(IterableDataset[int]):
    """The shape of Hugging Face's stream after `split_dataset_by_node`."""

    _distributed = SimpleNamespace(rank=0, world_size=2)

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, LENGTH, 2))


def test_a_stream_split_by_node_is_refused_before_ranks_start() -> None:
    kind = type("IterableDataset", (Node,), {"__module__": "datasets.iterable_dataset"})
    for argument in ("train_loader", "val_loader"):
        with pytest.raises(UserError, match="after split_dataset_by_node for 2 ranks") as caught:
            Source.of(DataLoader(kind(), batch_size=2), argument)
        assert caught.value.field == argument
    declared = kind()
    declared.shards_itself = True
    assert Source.of(declared, "train_loader").shards_itself
    whole = kind()
    whole._distributed = None
    assert Source.of(whole, "train_loader").length is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"jpg": b"ab", "__key__": "0"}, {"jpg": b"ac", "__key__": "0"}),
        (np.array(["a", {"b": 1}], dtype=object), np.array(["a", {"b": 2}], dtype=object)),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (torch.tensor(3), torch.tensor(4)),
    ],
)
def test_samples_of_many_kinds_have_a_digest(one: Any, other: Any) -> None:
    assert fingerprint([one]) != fingerprint([other])
    same = one.copy() if hasattr(one, "copy") else one.clone()
    assert fingerprint([one]) == fingerprint([same])


def test_samples_without_plain_memory_are_equal_to_all_others() -> None:
    sparse = torch.eye(3).to_sparse()
    assert fingerprint([sparse]) == fingerprint([torch.zeros(3, 3).to_sparse()])


# -- states that do not hold the position ----------------------------------------------------------


class BufferShuffledExamplesIterable:
    """As in Hugging Face datasets: its state is that of its source, without the buffer's content."""

    def __init__(self, length: int, buffer_size: int) -> None:
        self.ex_iterable: Any = SimpleNamespace()
        self.length, self.buffer_size, self.position, self.begin = length, buffer_size, 0, 0

    def __iter__(self) -> Iterator[int]:
        drawn, buffer = random.Random(0), []
        begin, self.begin = self.begin, 0
        for number in range(begin, self.length):
            self.position = number + 1
            buffer.append(number)
            if len(buffer) == self.buffer_size:
                yield buffer.pop(drawn.randrange(len(buffer)))
        yield from buffer


class Buffered(IterableDataset[int]):
    """As Hugging Face's IterableDataset after `.shuffle(buffer_size=12)` and `.map`."""

    def __init__(self) -> None:
        self.inner = BufferShuffledExamplesIterable(LENGTH, 12)
        self._ex_iterable = SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=self.inner)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.inner.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.inner.begin = state["position"]


class Mosaic(Numbers):
    """As mosaicml's StreamingDataset, whose state needs to be told the position."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"position": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


class NeedsMore(Numbers):
    def state_dict(self) -> dict[str, int]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, int], strict: bool) -> None:
        raise AssertionError


def test_a_state_that_cannot_be_taken_alone_is_not_used() -> None:
    assert not any(is_stateful(kind()) for kind in (Numbers, Mosaic, NeedsMore, Buffered))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Buffered, Mosaic, NeedsMore])
def test_no_sample_is_lost_where_the_state_does_not_hold_the_position(
    kind: type[IterableDataset[int]], workers: int
) -> None:
    def feed() -> Feed:
        return Feed(Source.of(DataLoader(kind(), batch_size=4, num_workers=workers), "train_loader"), 4)

    whole = [x for w in feed().windows(0) for x in w.micro_batches[0].batch.tolist()]
    assert sorted(whole) == list(range(LENGTH))
    first = feed()
    windows = first.windows(0)
    found = next(windows).micro_batches[0].batch.tolist()
    second = feed()
    second.restore(decode(encode(first.state)))
    assert second.rereads
    found += [x for w in second.windows(0, 4) for x in w.micro_batches[0].batch.tolist()]
    assert found == whole


def test_a_state_that_an_earlier_version_saved_of_a_shuffle_buffer_is_not_loaded() -> None:
    feed = Feed(Source.of(DataLoader(Buffered(), batch_size=4), "train_loader"), 4)
    feed.restore({"dataset": {"position": 16}, "rng": None})
    found = [x for w in feed.windows(0, 4) for x in w.micro_batches[0].batch.tolist()]
    assert len(set(found)) == LENGTH - 4


def test_a_run_over_a_shuffle_buffer_resumes_exactly(tmp_path: Path) -> None:
    for steps in (2, 5):
        model = Cells()
        trainer = make_trainer(
            model, folder=tmp_path, training_step=used, optimizer=torch.optim.SGD, learning_rate=1.0,
            batch_size=4, resume_from_checkpoint=True,
        )  # fmt: skip
        trainer.fit(Buffered(), max_steps=steps)
    assert model.cells.tolist() == [-1 / 4] * LENGTH


# -- lengths ---------------------------------------------------------------------------------------


class Sized(Numbers):
    """Yields `number` samples, and its length is `length`."""

    def __init__(self, length: Any = LENGTH, number: int = LENGTH) -> None:
        self.length, self.number = length, number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.number))

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


class SizedShare(Sized):
    shards_itself = True


def rates(stream: Any, **fields: Any) -> list[float]:
    trainer = make_trainer(
        Cells(), training_step=used, optimizer=torch.optim.SGD, learning_rate=1.0, batch_size=4, **fields
    )
    return trainer.fit(stream).steps["learning_rate"]


def test_a_streams_length_is_the_end_of_a_decay() -> None:
    whole = list(range(LENGTH))
    expected = rates(whole, scheduler="cosine", epochs=2)
    assert rates(Sized(), scheduler="cosine", epochs=2) == expected
    assert len(expected) == 10
    assert expected[-1] < 0.1


@pytest.mark.parametrize("error", [TypeError(), NotImplementedError()])
def test_a_length_that_raises_is_none(error: Exception) -> None:
    assert Source.of(Sized(error), "train_loader").length is None
    assert rates(Sized(error)) == [1.0] * 5
    with pytest.raises(UserError, match="needs an end"):
        rates(Sized(error), scheduler="cosine")


def test_the_length_of_a_stream_that_shards_itself_may_be_one_ranks() -> None:
    assert Source.of(SizedShare(7), "train_loader").length is None
    assert rates(SizedShare(7)) == [1.0] * 5


def test_a_stream_of_length_0_is_refused() -> None:
    for argument in ("train_loader", "val_loader"):
        with pytest.raises(UserError, match="Sized of length 0") as caught:
            Source.of(Sized(0), argument)
        assert caught.value.field == argument


@pytest.mark.parametrize(
    ("length", "number", "found"),
    [(20, 18, "18"), (20, 16, "16"), (16, 20, "at least 20"), (17, 18, "at least 18")],
)
def test_another_number_of_samples_than_the_length_is_an_error(length: int, number: int, found: str) -> None:
    with pytest.raises(UserError, match="another number of samples in epoch 0 than its length") as caught:
        rates(Sized(length, number))
    assert caught.value.field == "train_loader"
    assert f"Got '{found} samples of Sized'. Allowed: {length}, the result of len()" in str(caught.value)


@pytest.mark.parametrize(("length", "number"), [(18, 18), (18, 19), (19, 17)])
def test_what_drop_last_drops_may_differ_from_the_length(length: int, number: int) -> None:
    assert rates(Sized(length, number), data={"drop_last": True}) == [1.0] * 4


@pytest.mark.parametrize("number", [18, 22])
def test_another_number_of_validation_samples_is_an_error(number: int) -> None:
    with pytest.raises(UserError, match="than its length") as caught:
        train(None, list(range(LENGTH)), Sized(20, number), ranks=1, batch_size=4)
    assert caught.value.field == "val_loader"


def test_a_length_is_kept_over_a_second_fit() -> None:
    model = Cells()
    trainer = make_trainer(
        model, training_step=used, optimizer=torch.optim.SGD, learning_rate=1.0, batch_size=4
    )
    trainer.fit(Sized(), max_steps=3)
    assert trainer.fit(Sized(), epochs=1).num_samples == 8
    assert model.cells.tolist() == [-1 / 4] * LENGTH


class Counted(Numbers):
    num_stream_samples = 20


def test_num_stream_samples_is_a_length_too() -> None:
    assert Source.of(Counted(), "train_loader").length == 20
    assert len(rates(Counted(), scheduler="cosine")) == 5
