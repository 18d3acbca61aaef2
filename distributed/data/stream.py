"""Iterable datasets, dealt out in whole windows inside the process that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from distributed.data.order import split_window
from distributed.data.sample_rng import RandomStreams
from distributed.data.source import Source

__all__ = ["DealtStream", "SelfShardedStream", "same"]

Pairs = list[tuple[Any, int]]


def same(value: Any) -> Any:
    """The collate function of a stream that has already collated."""
    return value


class DealtStream(IterableDataset[Any]):
    """Every rank reads the whole stream; each keeps its slice of every global batch.

    Yields ``(samples over all ranks, [(batch, samples of this rank), ...])``. Reading all of
    it costs each rank the reading of all samples; a dataset that can do better says
    ``shards_itself = True``.

    Args:
        source: the data.
        batch_size: samples per micro-batch.
        accumulation: micro-batches per full window.
        rank: data-parallel rank.
        size: data-parallel size.
        start: samples to pass over.
        drop_last: leave out the last window when it is smaller.
        seed: of the random numbers that the dataset draws while it is read.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        accumulation: int,
        rank: int,
        size: int,
        start: int,
        drop_last: bool,
        seed: int,
    ) -> None:
        self.source, self.batch_size, self.accumulation = source, batch_size, accumulation
        self.rank, self.size, self.start, self.drop_last, self.seed = rank, size, start, drop_last, seed

    def __iter__(self) -> Iterator[tuple[int, Pairs]]:
        for window in self._windows(self.batch_size * self.accumulation * self.size, self.start):
            spans = split_window(len(window), self.rank, self.size, self.batch_size)
            yield len(window), [self._collate(window, *span) for span in spans]

    def _windows(self, wanted: int, start: int) -> Iterator[list[Any]]:
        streams = RandomStreams(self.seed)
        with streams:
            samples = iter(self.source.dataset)
            for _ in islice(samples, start):
                pass
        while True:
            with streams:
                window = list(islice(samples, wanted))
            if not window or (len(window) < wanted and self.drop_last):
                return
            yield window

    def _collate(self, window: list[Any], start: int, stop: int) -> tuple[Any, int]:
        samples = window[start:stop] or window[: self.batch_size]
        return self.source.collate_fn(samples), stop - start


class SelfShardedStream(DealtStream):
    """The stream holds this rank's samples alone, read from its beginning. Yields this rank's
    count as the total: the feed sums it over the ranks and passes over what is done."""

    def __iter__(self) -> Iterator[tuple[int, Pairs]]:
        for window in self._windows(self.batch_size * self.accumulation, 0):
            pairs = [
                self._collate(window, *span) for span in split_window(len(window), 0, 1, self.batch_size)
            ]
            # Every rank runs the same number of micro-batches, whatever its stream holds.
            pairs += [(pairs[0][0], 0)] * (self.accumulation - len(pairs))
            yield len(window), pairs
