"""The order of a large dataset: a permutation, by (seed, epoch) alone, in which no structure is left."""

from __future__ import annotations

import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from distributed.checkpoint.filesystem import seal, unseal
from distributed.checkpoint.reader import PortableReader
from distributed.data import Feed, Source, epoch_seed
from distributed.data.keyed_order import LARGE, KeyedOrder
from distributed.errors import UserError
from distributed.testing.oracle import sample_order
from tests.support.training import make_trainer

quick = settings(deadline=None, max_examples=150, derandomize=True)
seeds = st.integers(0, 2**63 - 1)


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their own indices."""

    def __init__(self, length: int = LARGE + 5) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def source(length: int = LARGE + 5) -> Source:
    return Source.of(Numbers(length), "train_loader")


def first(feed: Feed, epoch: int = 0, start: int = 0, windows: int = 3) -> list[int]:
    """Samples of the first windows; their micro-batches one after another."""
    found: list[int] = []
    for _, window in zip(range(windows), feed.windows(epoch, start), strict=False):
        for batch, count in window.micro_batches:
            found += [int(x) for x in batch[:count]]
    return found


@quick
@given(st.integers(1, 3000) | st.just(2**15), seeds, st.integers(0, 9))
def test_every_sample_comes_once(length: int, seed: int, epoch: int) -> None:
    order = KeyedOrder(length, seed, epoch)
    assert torch.equal(order[:].sort().values, torch.arange(length))
    assert len(order) == length


@quick
@given(st.integers(1, 2**40), seeds, st.data())
def test_a_part_is_what_the_whole_has_there(length: int, seed: int, data: st.DataObject) -> None:
    order = KeyedOrder(length, seed, 0)
    start = data.draw(st.integers(0, length))
    part, single = order[start : start + 20], order[start : start + 1]
    assert part[:1].tolist() == single.tolist()
    assert len(part) == min(20, length - start) == len(part.unique())
    assert part.dtype == torch.int64
    assert all(0 <= index < length for index in part.tolist())
    pieces = list(order.pieces([(start, start), (start, min(start + 3, length)), (0, 1)]))
    assert [piece.tolist() for piece in pieces] == [[], part[:3].tolist(), order[:1].tolist()]


def deviation(values: np.ndarray, limit: int) -> float:
    """Chi-square of 100 equal classes of ``0 .. limit - 1``, in standard deviations from its mean of 99."""
    counts, _ = np.histogram(values, bins=100, range=(0, limit))
    expected = len(values) / 100
    return float((((counts - expected) ** 2 / expected).sum() - 99) / np.sqrt(2 * 99))


# A prime; a square, in which the network's two numbers have the same size; and just above one.
@pytest.mark.parametrize("length", [99_991, 316**2, 316**2 + 1])
def test_no_structure_is_left(length: int) -> None:
    places = np.arange(length)
    orders = [KeyedOrder(length, *key)[:].numpy() for key in ((0, 0), (0, 1), (1, 0))]
    side = int(np.sqrt(length))
    for order in orders:
        assert abs(deviation((order - places) % length, length)) < 4.5
        assert np.sum(order == places) < 8  # 1 is expected
        # What one position behind another, or one row behind another, adds; a random order has 63 %
        # different ones of n possible.
        for lag in (1, 2, side, side + 1):
            steps = (order[lag:] - order[:-lag]) % length
            assert abs(deviation(steps, length)) < 4.5
            assert 0.62 < len(np.unique(steps)) / length < 0.645
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4.5 / np.sqrt(length)
        # The first hundredth, as of an epoch that ends early, is a fair sample of all.
        assert abs(deviation(order[: length // 100], length)) < 4.5
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.sum(orders[one] == orders[other]) < 8
        assert abs(deviation((orders[one] - orders[other]) % length, length)) < 4.5


def test_it_is_the_same_everywhere_and_for_ever() -> None:
    """Checkpoints name it ``keyed-1``: other numbers need another name."""
    assert KeyedOrder(LARGE, 0, 0)[:3].tolist() == [2275552, 2784362, 13823393]
    far = KeyedOrder(10**11, 7, 3)[10**10 : 10**10 + 3]
    assert far.tolist() == [8208375621, 89457052154, 7650203743]


def test_large_data_is_read_in_it_and_small_data_as_before() -> None:
    expected = KeyedOrder(LARGE + 5, 3, 1)
    for workers in (1, 2, 3):
        ranks = [Feed(source(), 6 // workers, rank=rank, size=workers, seed=3) for rank in range(workers)]
        parts = [first(feed, 1, start=12) for feed in ranks]
        size = 6 // workers
        together = [x for at in range(0, 3 * size, size) for part in parts for x in part[at : at + size]]
        assert together == expected[12:30].tolist()
    # Over the end of what is computed at once, and the smaller last window.
    feed = Feed(source(), 4096, seed=3)
    whole = first(feed, 1, start=0, windows=5)
    assert whole == expected[: 5 * 4096].tolist()
    assert first(feed, 1, start=LARGE - 4096, windows=9) == expected[LARGE - 4096 :].tolist()
    assert Feed(source(LARGE - 1), 2).order == {"name": "randperm", "seed": 0, "num_samples": LARGE - 1}


def test_no_index_is_kept_in_memory() -> None:
    tracemalloc.start()
    try:
        read = first(Feed(source(100_000_000), 32, seed=1), windows=40)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert read == KeyedOrder(100_000_000, 1, 0)[:1280].tolist()


def stepped(seen: list[float], model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    seen += batch.tolist()
    mean: torch.Tensor = model(batch[:, None] * 0.0).mean()
    return mean


def trained(steps: int, folder: Path, **fields: Any) -> list[int]:
    """The samples that a run of `steps` steps reads; it saves the last."""
    seen: list[float] = []
    step = partial(stepped, seen)
    trainer = make_trainer(torch.nn.Linear(1, 1), folder=folder, training_step=step, batch_size=4, **fields)
    trainer.fit(Numbers(), max_steps=steps)
    return [int(index) for index in seen]


@pytest.mark.slow
def test_a_run_continues_in_the_order_in_which_it_began(tmp_path: Path) -> None:
    length, resumed = LARGE + 5, {"resume_from_checkpoint": True}
    keyed = KeyedOrder(length, 0, 0)[:24].tolist()
    drawn = torch.randperm(length, generator=torch.Generator().manual_seed(epoch_seed(0, 0)))[:24].tolist()
    assert sample_order(length, 0, 0)[:24].tolist() == keyed
    assert trained(2, tmp_path) == keyed[:8]
    (saved,) = tmp_path.glob("step_*/manifest.json")
    content = unseal(saved.read_bytes())
    assert PortableReader(str(saved.parent)).extra["order"] == {
        "name": "keyed-1",
        "seed": 0,
        "num_samples": length,
    }
    assert trained(4, tmp_path, **resumed) == keyed[8:16]
    # As a version without keyed orders wrote it, after as many samples.
    shutil.rmtree(tmp_path / "step_00000004")
    del content["extra"]["order"]
    saved.write_bytes(seal({key: value for key, value in content.items() if key != "sha256"}))
    assert trained(4, tmp_path, **resumed) == drawn[8:16]
    assert trained(6, tmp_path, **resumed) == drawn[16:24]
    newest = PortableReader(str(tmp_path / "step_00000006"))
    assert newest.extra["order"] == {"name": "randperm", "seed": 0, "num_samples": length}


def test_an_order_belongs_to_its_data_and_an_unknown_one_is_refused() -> None:
    small, large = Feed(source(100), 4), Feed(source(), 4)
    small.continue_order({"name": "keyed-1", "num_samples": LARGE + 5})
    large.continue_order({"name": "randperm", "num_samples": 100})
    assert [small.order, large.order] == [
        {"name": "randperm", "seed": 0, "num_samples": 100},
        {"name": "keyed-1", "seed": 0, "num_samples": LARGE + 5},
    ]
    with pytest.raises(UserError, match=r"keyed-9.*Allowed: randperm, keyed-1"):
        small.continue_order({"name": "keyed-9", "num_samples": 100})
    for options in ({"evaluation": True}, {}):
        ordered = Source.of(Numbers(9), "train_loader", shuffle=bool(options))
        expected = None if options else {"name": "sequential", "num_samples": 9}
        assert Feed(ordered, 4, **options).order == expected


@pytest.mark.parametrize(
    ("saved", "field"), [({"seed": 1}, "seed"), ({"num_samples": 99}, "train_loader"), ({}, "")]
)
def test_within_an_epoch_seed_and_data_stay(saved: dict[str, int], field: str) -> None:
    feed = Feed(source(100), 4)
    order = {"name": "randperm", "seed": 0, "num_samples": 100} | saved
    feed.continue_order(order)
    if not saved:
        feed.continue_order(order, inside=0)
        return
    with pytest.raises(UserError, match=f"^{field}: .*some samples would be missed and others repeated"):
        feed.continue_order(order, inside=0)
