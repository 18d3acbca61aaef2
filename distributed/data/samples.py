"""Samples of map-style data, as a DataLoader's workers read and join them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import Dataset, get_worker_info

from distributed.data.fingerprint import fingerprint
from distributed.data.order import mix
from distributed.data.sample_rng import RandomStreams, seed_all
from distributed.errors import UserError

__all__ = ["Batches", "Samples", "begin_worker", "set_epoch"]


_TOLD: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Dataset -> the epoch that it was told last in this process."""


def begin_worker(function: Callable[[int], None] | None, worker: int) -> None:
    """Run the user's ``worker_init_fn`` in a worker, whose info has the user's dataset."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if function is not None:
        function(worker)


def set_epoch(dataset: Any, seed: int, epoch: int, known: int = -1) -> None:
    """Report an epoch to a dataset that has the method; all ranks and workers draw the same in it.

    Args:
        known: the last epoch that it was told in another process.
    """
    if not hasattr(dataset, "set_epoch"):
        return
    last = epoch - 1
    with suppress(TypeError, ValueError):  # not hashed, not compared, or not referred to weakly
        last, _TOLD[dataset] = _TOLD.get(dataset, known), epoch
    # All epochs in turn, as in an uninterrupted run: the dataset may go by the one before.
    for each in range(last + 1 if last <= epoch else epoch, epoch + 1):
        with RandomStreams(mix(seed, each, 6)):
            dataset.set_epoch(each)


def _counts_of(function: Any) -> list[Any]:
    """Numbers and texts that a function keeps between its calls, which may be counts that it uses later."""
    objects = (function, getattr(function, "__self__", None), getattr(function, "func", None))
    kept = [value for part in objects for value in getattr(part, "__dict__", {}).values()]
    return [value for value in kept if isinstance(value, (bool, int, float, str))]


class Batches:
    """The sampler of a loader over `Samples`, which may have persistent workers."""

    source: Callable[[], Iterator[list[Any]]] = staticmethod(lambda: iter(()))

    def __iter__(self) -> Iterator[list[Any]]:
        return self.source()


class Samples(Dataset[Any]):
    """Makes a batch of ``[(epoch, place, compares), index, ...]`` where the samples are read. With `compares`
    it is read twice before, and becomes an error if the two differ.

    A worker draws its random numbers from (seed, epoch, place), so that a batch is the same in a run that
    resumes within the epoch. It tells `dataset` of a new epoch: a persistent worker has a copy of its own.

    Args:
        dataset: map-style.
        collate_fn: makes a batch of a list of samples.
        seed: of the run.
        per_sample: seed before each sample, by (seed, epoch, index), in whatever process it is read.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int, per_sample: bool
    ) -> None:
        self.dataset, self.collate_fn, self.seed, self.per_sample = dataset, collate_fn, seed, per_sample
        self._epoch: int | None = None

    def __getitem__(self, key: list[Any]) -> Any:
        (epoch, place, compares), *indices = key
        seed = mix(self.seed, epoch, place, 4)
        if get_worker_info() is not None:
            self.begin(epoch)
            seed_all(seed)
        if compares and len({self._digest(epoch, indices, seed) for _ in range(2)}) > 1:
            return UserError(
                "samples or collate_fn draw random numbers from a generator of their own, or depend on how"
                " often they were called, so that a resumed run cannot read what the uninterrupted one would",
                field="deterministic",
                got=f"true, with {type(self.dataset).__name__}",
                allowed="samples that depend on index, epoch and the generators of random, numpy and torch",
                remedy="Draw from random, numpy.random or torch without a generator of the dataset's own, or"
                " set deterministic=false",
            )
        return self._batch(epoch, indices)

    def _batch(self, epoch: int, indices: list[Any]) -> Any:
        try:
            return self.collate_fn(self._read(epoch, indices))
        except StopIteration as error:
            raise RuntimeError(
                f"the dataset or collate_fn raised StopIteration for samples {indices[:8]}, which would end"
                " the epoch without an error"
            ) from error

    def _digest(self, epoch: int, indices: list[Any], seed: int) -> str:
        """Digest of samples and batch, read with equal random numbers, of which none are drawn for it."""
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        state = torch.cuda.get_rng_state() if on_gpu else None
        with RandomStreams(seed):
            if state is not None:
                torch.cuda.manual_seed(seed)
            read = [self._read(epoch, indices[:1]), self._batch(epoch, indices)]
            found = fingerprint([*read, _counts_of(self.collate_fn)], without=self.dataset)
        if state is not None:
            torch.cuda.set_rng_state(state)
        return found

    def begin(self, epoch: int) -> None:
        """Report a new epoch to the dataset of this process, if it has ``set_epoch``."""
        if epoch != self._epoch:
            set_epoch(self.dataset, self.seed, epoch, -1 if self._epoch is None else self._epoch)
        self._epoch = epoch

    def _read(self, epoch: int, indices: list[Any]) -> list[Any]:
        if self.per_sample:
            return [self._seeded(epoch, index) for index in indices]
        read_together = getattr(self.dataset, "__getitems__", None)
        return read_together(indices) if read_together else [self.dataset[index] for index in indices]

    def _seeded(self, epoch: int, index: int) -> Any:
        with RandomStreams(mix(self.seed, epoch, index, 2)):
            return self.dataset[index]
