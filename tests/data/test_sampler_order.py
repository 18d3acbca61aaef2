"""Orders of samplers with random numbers or a history of their own: read once, and again after a restart."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
)

from distributed import UserError
from distributed.data import Feed, Source
from tests.data.test_data import Ids, flat, read

NUM = 24


class Own(Sampler[int]):
    """Shuffles with a generator of its own, of a kind that a subclass makes."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(NUM), NUM))


class OfNumpy(Own):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(NUM).tolist())


class OfTorch(Own):
    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM, generator=self.own).tolist())


class OfGlobals(Own):
    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(NUM).tolist()
        random.shuffle(order)
        return iter(order[torch.randint(NUM, ()) :] + order)


class Rotated(Own):
    """Each epoch begins one sample later: no random numbers, and a history."""

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(np.roll(np.arange(NUM), -self.calls).tolist())


class Grows(Own):
    """Epochs of 8, 16, 24 samples."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 8 * min(self.calls + 1, 3)

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(random.sample(range(NUM), 8 * min(self.calls, 3)))


class NoLength:
    """No Sampler, and no length."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        yield from self.random.sample(range(NUM), NUM)


class Batches(Own):
    """Batches of random sizes."""

    def __iter__(self) -> Iterator[Any]:
        order, cuts = self.random.sample(range(NUM), NUM), sorted(self.random.sample(range(1, NUM), 4))
        return iter([order[a:b] for a, b in itertools.pairwise([0, *cuts, NUM])])


class Grouped(BatchSampler):
    """Pairs in a random order, of a sampler with random numbers of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        pairs = list(super().__iter__())
        random.shuffle(pairs)
        return iter(pairs)


def source_of(sampler: Any) -> Source:
    if isinstance(sampler, (Batches, BatchSampler)):
        return Source.of(DataLoader(Ids(NUM), batch_sampler=sampler), "train_loader")
    return Source.of(DataLoader(Ids(NUM), 4, sampler=sampler), "train_loader")


def feed_of(sampler: Any, size: int = 4) -> Feed:
    source = source_of(sampler)
    return Feed(source, 1 if source.order == "batch_sampler" else size)


SAMPLERS = {
    "random.Random": Own,
    "numpy": OfNumpy,
    "torch": OfTorch,
    "global": OfGlobals,
    "history": Rotated,
    "length": Grows,
    "no length": NoLength,
    "batches": Batches,
    "grouped": lambda: Grouped(Own(), 2, False),
    "replacement": lambda: RandomSampler(range(NUM), replacement=True, generator=torch.Generator()),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("stop", [0, 2])
def test_a_new_process_continues_the_order(kind: str, stop: int) -> None:
    """Three epochs in one feed, and in two, of which the second begins in the third epoch."""
    whole = feed_of(SAMPLERS[kind]())
    expected = [flat(read([whole], epoch)) for epoch in range(3)]
    assert expected[0] != expected[1] != expected[2]
    first = feed_of(SAMPLERS[kind]())
    for epoch in range(2):
        assert flat(read([first], epoch)) == expected[epoch]
    samples = len(flat(read([first], 2, limit=stop))) if stop else 0
    second = feed_of(SAMPLERS[kind]())
    second.continue_order(first.order, inside=2 if samples else None)
    assert flat(read([second], 2, samples)) == expected[2][samples:]


def test_one_process_continues_and_begins_again() -> None:
    """A second `fit` has the sampler as the first one left it; a resumed run in this process begins again."""
    sampler = Own()
    feed = feed_of(sampler)
    expected = [flat(read([feed], epoch)) for epoch in range(2)]
    saved = feed.order
    third = flat(read([feed], 2))
    following = feed_of(sampler)
    following.continue_order(feed.order)
    fourth = flat(read([following], 3))
    again = feed_of(sampler)
    again.continue_order(saved)
    assert [flat(read([again], epoch)) for epoch in (2, 3)] == [third, fourth]
    assert len({tuple(order) for order in (*expected, third, fourth)}) == 4


class Unseeded(Own):
    def __init__(self) -> None:
        self.random = random.Random()


class Periodic(Own):
    """Two orders in turn, of which the second run has the other first."""

    def __init__(self, first: int = 0) -> None:
        self.calls = first

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(range(NUM)) if self.calls % 2 else iter(range(NUM)[::-1])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "kinds", [(Unseeded, Unseeded), (Periodic, partial(Periodic, 1))], ids=["unseeded", "phase"]
)
def test_another_order_is_refused(kinds: tuple[Any, Any], inside: bool) -> None:
    first, second, third = (feed_of(kind()) for kind in (*kinds, kinds[1]))
    read([first], 0)
    read([first], 1, limit=1)
    second._repeats = True  # deterministic
    for feed in (second, third):
        feed.continue_order(first.order, inside=1 if inside else None)
    place = (1, 4) if inside else (2, 0)
    for feed in (second, third) if inside else (second,):
        with pytest.raises(UserError, match=r"sampler drew other samples.*Seed its random numbers"):
            feed.windows(*place)
    if not inside:  # nothing is missed: the order begins there
        assert sorted(flat(read([third], *place))) == list(range(NUM))


def test_another_kind_of_order_is_refused_within_an_epoch() -> None:
    shuffled = Feed(Source.of(DataLoader(Ids(NUM), 4, shuffle=True), "train_loader"), 4)
    sequential = Feed(Source.of(DataLoader(Ids(NUM), 4), "train_loader"), 4)
    drawn = feed_of(Own())
    read([drawn], 0)
    for saved, resumed in ((shuffled, drawn), (drawn, shuffled), (drawn, sequential)):
        with pytest.raises(UserError, match="begun in another order"):
            resumed.continue_order(saved.order, inside=0)
        resumed.continue_order(saved.order)


# -- without an end --------------------------------------------------------------------------


class Endless(Sampler[int]):
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.seed)
        while True:
            yield from order.sample(range(NUM), NUM)


class WithLength(Endless):
    """As detection libraries have it: the length of the dataset, and no end."""

    def __len__(self) -> int:
        return NUM


class EndlessBatches(Endless):
    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        while True:
            yield [next(order) for _ in range(3)]


@pytest.mark.parametrize("kind", [Endless, WithLength, EndlessBatches])
def test_a_sampler_without_an_end(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.data.sampler_order._UNKNOWN", 100)
    monkeypatch.setattr("distributed.data.sampler_order._CHUNK", 7)
    batches = kind is EndlessBatches
    source = Source.of(
        DataLoader(Ids(NUM), batch_sampler=kind()) if batches else DataLoader(Ids(NUM), 3, sampler=kind()),
        "train_loader",
    )
    feed = Feed(source, 1 if batches else 3, 2)
    expected = list(itertools.islice(iter(Endless()), 180))
    assert flat(read([feed], limit=20)) == expected[:120]
    assert feed.state is not None
    resumed = Feed(source, 1 if batches else 3, 2)
    resumed.restore(feed.state)
    resumed.continue_order(feed.order, inside=0)
    assert flat(read([resumed], 0, 120, limit=10)) == expected[120:]
    source.sampler.seed = 1
    other = Feed(source, 1 if batches else 3, 2)
    other.restore(feed.state)
    with pytest.raises(UserError, match="other samples in the first 120 draws"):
        next(iter(other.windows(0, 120)))
