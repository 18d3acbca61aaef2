"""Iterable datasets, dealt out in whole windows inside the process that reads them.

Each window carries the state that resumes the stream after it, taken before anything is read
ahead: the dataset's own state where it has ``state_dict`` and ``load_state_dict`` that restore its
position exactly, else only a digest of the first sample, by which a stream that is read again is
known to be another.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import IterableDataset, get_worker_info

from distributed.data.fingerprint import fingerprint
from distributed.data.order import mix, split_window
from distributed.data.sample_rng import RandomStreams, seed_all
from distributed.data.source import Source, looks_like_batch
from distributed.errors import UserError

__all__ = ["DealtStream", "SelfShardedStream", "is_stateful", "loses_samples", "same"]

logger = logging.getLogger("distributed")

_OPENED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Dataset -> how often it was opened in this process."""


def _openings(dataset: Any, more: int = 0) -> int:
    """Number of openings of a dataset in this process, `more` included; a high one where it is unknown."""
    try:
        _OPENED[dataset] = _OPENED.get(dataset, 0) + more
        return _OPENED[dataset]
    except (TypeError, ValueError):  # not hashed, not compared, or not referred to weakly
        return sys.maxsize


def same(value: Any) -> Any:
    """The collate function of a stream that has already collated."""
    return value


def is_stateful(part: Any) -> bool:
    """Whether a dataset, or its iterator, can save its position and restore it exactly."""
    return (
        _callable_with(part, "state_dict")
        and _callable_with(part, "load_state_dict", {})
        and not (loses_samples(part))
    )


def loses_samples(dataset: Any) -> bool:
    """Whether `dataset` is a Hugging Face stream with a shuffle buffer, whose content its state lacks."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        for inner in (getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())):
            if inner is not None:
                parts.append(inner)
    return False


def _callable_with(part: Any, name: str, *args: Any) -> bool:
    """Whether `part` has a method `name` that takes `args` and requires no others."""
    method = getattr(part, name, None)
    if not callable(method):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # methods of C may have none
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


class DealtStream(IterableDataset[Any]):
    """Every rank reads the whole stream; each keeps its slice of every global batch.

    Yields ``(samples over all ranks, [(batch, samples of this rank), ...], state)``; before them, if
    `announce` is set, a digest of the first window's samples, by which ranks know that they read the same
    stream. Each rank reads all samples; a dataset that can do better declares ``shards_itself = True``.

    Args:
        batch_size: samples per micro-batch.
        accumulation: micro-batches per full window.
        rank: data-parallel rank.
        size: data-parallel size.
        start: samples to pass over.
        drop_last: leave out the last window when it is smaller.
        seed: of the random numbers that the dataset draws while it is read.
        state: state of the window after which to resume; None skips `start` samples.
        keep_state: give each window its state.
        announce: yield the digest of the first window first; that of a stream without samples is empty.
        fewest: samples that a micro-batch with samples has at least, as far as the data allows.
        epoch: that is read. A stream with a history of its own was opened once for each epoch before it.
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
        state: Any = None,
        keep_state: bool = True,
        announce: bool = False,
        fewest: int = 1,
        epoch: int = 0,
    ) -> None:
        self.source, self.batch_size, self.accumulation = source, batch_size, accumulation
        self.rank, self.size, self.start, self.drop_last, self.seed = rank, size, start, drop_last, seed
        self.state, self.keep_state, self.announce = state or {}, keep_state, announce
        self.fewest, self.epoch = fewest, epoch

    def __iter__(self) -> Iterator[Any]:
        windows = self._windows(self.batch_size * self.accumulation * self.size, self.start)
        if self.announce:
            first = list(islice(windows, 1))
            yield "".join(f"{len(window)} {fingerprint(window)}" for window, _ in first)
            windows = chain(first, windows)
        position = self.start
        for window, state in windows:
            spans = split_window(len(window), self.rank, self.size, self.batch_size, self.fewest)
            yield len(window), self._collated(window, position, spans, len(spans)), state
            position += len(window)

    def _windows(self, wanted: int, start: int) -> Iterator[tuple[list[Any], Any]]:
        self._open_epochs()
        streams = RandomStreams(self.seed)
        with streams:
            origin, samples = self._opened()
            self._stateful = is_stateful(origin)
            samples = samples if "dataset" in self.state else self._passed(samples, start)
        if "dataset" in self.state:
            streams.go_on_from(self.state["rng"])
        while True:
            with streams:
                window = list(islice(samples, wanted))
            if not window or (len(window) < wanted and self.drop_last):
                return
            yield window, self._position(origin, streams)

    def _opened(self) -> tuple[Any, Iterator[Any]]:
        """(whose state it is, the samples), where the saved state is, or at the beginning."""
        dataset, saved = self.source.dataset, self.state.get("dataset")
        _openings(dataset, 1)
        if saved is not None and is_stateful(dataset):
            dataset.load_state_dict(copy.deepcopy(saved))
        samples = iter(dataset)
        if is_stateful(samples):
            if saved is not None:
                samples.load_state_dict(copy.deepcopy(saved))
            return samples, samples
        if saved is not None and not is_stateful(dataset):
            raise UserError(
                "the checkpoint holds a stream position from the dataset's state_dict(), but the dataset"
                " has no load_state_dict",
                field=self.source.argument,
                got=type(dataset).__name__,
                remedy="Resume with the dataset that was saved",
            )
        return dataset, samples

    def _passed(self, samples: Iterator[Any], start: int) -> Iterator[Any]:
        """The samples behind the first `start`."""
        first = list(islice(samples, 1))
        found, saved = fingerprint(first), self.state.get("first", "")
        if saved not in ("", found):
            logger.warning(
                "%s yielded another first sample than the saved stream, so samples may be repeated or"
                " missed. Training continues. Implement state_dict and load_state_dict in the dataset to"
                " restore its position",
                type(self.source.dataset).__name__,
            )
        if first and self.rank == self.epoch == start == 0 and looks_like_batch(first[0]):
            logger.warning(
                "%s yields what looks like batches, and each is read as one sample: a batch would stack"
                " several of them. Yield single samples",
                type(self.source.dataset).__name__,
            )
        self._first = found
        for _ in islice(samples, max(start - 1, 0)):
            pass
        return samples if start else chain(first, samples)

    def _open_epochs(self) -> None:
        """Bring a stream that counts its epochs, or draws from a generator of its own, to this epoch."""
        dataset = self.source.dataset
        if get_worker_info() is not None or hasattr(dataset, "set_epoch") or is_stateful(dataset):
            return  # a worker begins with the dataset as it was given
        firsts: list[str] = []
        while _openings(dataset) < self.epoch:
            _openings(dataset, 1)
            with RandomStreams(self.seed):
                samples = iter(dataset)
                if samples is dataset or is_stateful(samples):
                    return
                firsts.append(fingerprint(islice(samples, 1)))
            if len(firsts) == 2 and firsts[0] == firsts[1]:
                return  # without a history

    def _position(self, origin: Any, streams: RandomStreams) -> Any:
        if not self.keep_state:
            return None
        if self._stateful:
            return {"dataset": copy.deepcopy(origin.state_dict()), "rng": streams.state}
        return {"first": self._first}

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    def _collated(
        self, window: list[Any], position: int, spans: list[tuple[int, int]], number: int
    ) -> list[tuple[Any, int]]:
        """`number` micro-batches, placeholders behind those of `spans`. No sample is collated twice: that may
        change it."""
        if get_worker_info() is not None:  # what is drawn goes by the position, as it is after a resume
            seed_all(mix(self.seed, position, self.rank, 5))
        collate = self.source.collate_fn
        found = [(collate(window[start:stop]), stop - start) for start, stop in spans if stop > start]
        found = found or [(collate(window[: self.batch_size]), 0)]
        return found + [(found[0][0], 0)] * (number - len(found))


class SelfShardedStream(DealtStream):
    """The stream holds this rank's samples alone, read from its beginning. Yields this rank's
    count as the total: the feed sums it over the ranks and passes over what is done."""

    def __iter__(self) -> Iterator[Any]:
        position = self.state.get("position", 0) if "dataset" in self.state else 0
        for window, state in self._windows(self.batch_size * self.accumulation, 0):
            spans = split_window(len(window), 0, 1, self.batch_size, self.fewest)
            # Every rank runs the same number of micro-batches, whatever its stream holds.
            micro_batches = self._collated(window, position, spans, self.accumulation)
            position += len(window)
            if state is not None:
                state["position"] = position
            yield len(window), micro_batches, state
