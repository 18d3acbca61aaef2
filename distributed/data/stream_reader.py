"""StreamReader: the windows of an iterable dataset for one rank, from any cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from distributed.data.copies import copied
from distributed.data.error_notes import read
from distributed.data.order import mix
from distributed.data.samples import begin_worker
from distributed.data.source import Source
from distributed.data.stream import DealtStream, SelfShardedStream, same
from distributed.errors import UserError
from distributed.interfaces.backend import MicroBatch, Window

__all__ = ["Ahead", "StreamReader", "loader_generator"]

Windows = Iterator[tuple[Window, Any]]


class Ahead:
    """An iterator with a look-ahead that detects its end.

    Attributes:
        state: what came with the last window that was taken, whatever was read ahead.
    """

    state: Any = None

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._held: list[tuple[Window, Any]] = []

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        window, self.state = self._held.pop() if self._held else next(self._windows)
        return window

    def ended(self) -> bool:
        if not self._held:
            self._held += islice(self._windows, 1)
        return not self._held


class StreamReader:
    """Reads a stream, and refuses one with which ranks would train something else.

    Args:
        batch_size: samples per micro-batch.
        accumulation: micro-batches per full window.
        rank: data-parallel rank.
        size: data-parallel size.
        seed: seed of the run.
        drop_last: leave out the last window when it is smaller.
        keep_state: give each window the state that resumes the stream after it.
        total: sum of a number over the ranks; used per window for self-sharded streams.
        gather: the objects of all ranks; used once an epoch for streams that every rank reads. None
            does not compare them.

    Attributes:
        fewest: as of `Feed`.
    """

    fewest = 1

    def __init__(
        self,
        source: Source,
        batch_size: int,
        accumulation: int,
        *,
        rank: int,
        size: int,
        seed: int,
        drop_last: bool,
        keep_state: bool,
        total: Callable[[int], int],
        gather: Callable[[Any], list[Any]] | None,
    ) -> None:
        self.source, self.batch_size, self.accumulation = source, batch_size, accumulation
        self.rank, self.size, self.seed = rank, size, seed
        self.drop_last, self.keep_state = drop_last, keep_state
        self._total, self._gather = total, gather

    def windows(self, epoch: int, start: int, state: Any) -> Windows:
        """(window, state needed to resume after it) of `epoch` after the first `start` samples.

        Args:
            state: state of the stream at `start`; None reads it from the beginning.
        """
        windows = self._read(epoch, start, state)
        if not self.source.shards_itself:
            length = self.source.length
            return windows if length is None else self._counted(windows, length, epoch, start)
        # A rank's position in its own stream follows from its state, or from reading it again.
        position = start if "dataset" in (state or {}) else 0
        return self._agreed(windows, position, start, epoch, state)

    def _read(self, epoch: int, start: int, state: Any = None) -> Windows:
        """(window, state needed to resume after it) of this rank alone."""
        own = self.source.shards_itself
        compares = self._gather is not None and not own
        kind = SelfShardedStream if own else DealtStream
        # Ranks that read one stream have to read the same, also where it shuffles itself.
        seed = mix(self.seed, epoch, self.rank if own else 0, 3)
        stream = kind(
            self.source,
            self.batch_size,
            self.accumulation,
            self.rank,
            self.size,
            start,
            self.drop_last,
            seed,
            state,
            keep_state=self.keep_state,
            announce=compares,
            fewest=self.fewest,
            epoch=epoch,
        )
        items = read(self._loader(stream, epoch), self.source.argument)
        if compares:
            self._compare(next(items))
        for count, pairs, position in items:
            yield Window([MicroBatch(*pair) for pair in pairs], count), position

    def _loader(self, stream: DealtStream, epoch: int) -> DataLoader[Any]:
        options = dict(self.source.options)
        # Several workers would each replay the stream; one keeps the order and still prefetches.
        options["num_workers"] = min(1, options.get("num_workers", 0))
        if not options["num_workers"]:
            options = {"num_workers": 0, "pin_memory": options.get("pin_memory", False)}
        else:
            options["worker_init_fn"] = partial(begin_worker, options.get("worker_init_fn"))
        generator = loader_generator(self.seed, epoch, self.rank)
        return DataLoader(stream, batch_size=None, collate_fn=same, generator=generator, **options)

    def _compare(self, digest: str) -> None:
        """Raise a UserError when the first windows of the ranks differ. Collective."""
        assert self._gather is not None
        found = self._gather(digest)
        others = [rank for rank, other in enumerate(found) if other != found[0]]
        if others:
            raise UserError(
                "the ranks read different samples from an iterable dataset that does not declare"
                " shards_itself, so some samples would never be used and others several times",
                field=self.source.argument,
                got=f"{type(self.source.dataset).__name__}, whose first samples on {len(others)} of"
                f" {len(found)} ranks (first: rank {others[0]}) are not those of rank 0",
                allowed="a dataset that yields the same samples on every rank, or declares shards_itself",
                remedy="If each rank yields its own samples, set shards_itself = True on the dataset, or drop"
                " the splitter, so that each rank yields all samples (webdataset: nodesplitter=None;"
                " datasets: no split_dataset_by_node). If the dataset shuffles or draws random numbers,"
                " seed them equally on all ranks; data.verify=false skips this comparison",
            )

    def _counted(self, windows: Windows, length: int, epoch: int, start: int) -> Windows:
        """`windows`, as long as they hold as many samples as the dataset's length promises."""
        size = self.batch_size * self.accumulation * self.size
        end = length - (length - start) % size if self.drop_last else length
        position = start
        for window, state in windows:
            position += window.num_samples
            if position > end:
                raise self._other_length(f"at least {position}", length, epoch)
            yield window, state
        if position != end:
            raise self._other_length(str(position), length, epoch)

    def _other_length(self, found: str, length: int, epoch: int) -> UserError:
        kind = type(self.source.dataset).__name__
        return UserError(
            f"the iterable dataset yields another number of samples in epoch {epoch} than its length,"
            " by which schedules and steps were planned",
            field=self.source.argument,
            got=f"{found} samples of {kind}",
            allowed=f"{length}, the result of len()",
            remedy="Let __len__ return the number of samples of an epoch over all ranks, or remove it",
        )

    def _agreed(self, windows: Windows, position: int, start: int, epoch: int, state: Any) -> Windows:
        """Synchronise the ranks of a self-sharded stream, which may end at different times."""
        # What stands in for this rank's samples once its shard has ended. The first batch, taken before a
        # training step can change it.
        spare: Any = None
        while True:
            window, state = next(windows, (None, state))
            count = self._total(window.num_samples if window else 0)
            if count == 0:
                return
            if window is None and spare is None and position:
                first = next(self._read(epoch, 0), (None, None))[0]
                spare = first and first.micro_batches[0].batch
            if window is None and spare is None:
                raise UserError(
                    f"rank {self.rank} got no sample from a self-sharded dataset",
                    field=self.source.argument,
                    remedy="Give every rank at least one sample, or use fewer ranks",
                )
            if window is None:
                window = Window([MicroBatch(spare, 0)] * self.accumulation, 0)
            elif spare is None and self.size > 1:
                spare = copied(window.micro_batches[0].batch)
            position += count
            if position > start:
                yield Window(window.micro_batches, count), state


def loader_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """The generator of the DataLoader of a rank in an epoch."""
    return torch.Generator().manual_seed(mix(seed, epoch, rank, 1))
