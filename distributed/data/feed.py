"""Feed: the windows of a source for one rank, from any cursor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from distributed.data.error_notes import read
from distributed.data.keyed_order import LARGE, KeyedOrder, shuffled_order
from distributed.data.order import split_window, window_sizes
from distributed.data.rows import reader_of
from distributed.data.sampler_order import SamplerOrder
from distributed.data.samples import Batches, Samples, begin_worker
from distributed.data.source import Source
from distributed.data.stream import loses_samples, same
from distributed.data.stream_reader import Ahead, StreamReader, loader_generator
from distributed.errors import UserError
from distributed.interfaces.backend import MicroBatch, Window

_AHEAD = 8192
"""Samples of a rank whose place in a `KeyedOrder` is computed at once."""

_TOGETHER = 4096
"""Samples whose indices are divided into windows at once."""

_PLANNED = 2048
"""Samples of a rank whose indices are listed at once."""

_RANDPERM, _KEYED, _SAMPLER, _SEQUENTIAL = "randperm", "keyed-1", "sampler", "sequential"
"""Names of the orders in checkpoints: two shuffled ones, that of a user's sampler, and that of the data."""


class Feed:
    """One rank's view of a source.

    Args:
        batch_size: samples per micro-batch.
        accumulation: micro-batches per full window.
        rank: data-parallel rank.
        size: data-parallel size.
        broadcast: rank 0's object on every rank; used once an epoch for a user's sampler.
        total: sum of a number over the ranks; used per window for self-sharded streams.
        gather: the objects of all ranks; used once an epoch for other streams, to compare their first
            samples. None does not compare them.
        drop_last: overrides the source's own.
        per_sample_rng: tie the randomness of a sample to (seed, epoch, index).
        evaluation: keep every sample and do not shuffle (C5).
        pin: read in-memory tensors into pinned memory, whatever the loader's ``pin_memory``.
        repeats: refuse to resume where samples draw on random numbers that do not repeat.
        keeps_size: refuse a batch sampler's batch of another size than `batch_size`, but for the last.

    Attributes:
        fewest: samples that a micro-batch with samples has at least, as far as the data allows.
        joins: in evaluation, micro-batches may become larger, so that each rank has a sample in every window.
        continues_fit: an earlier `fit` of the same trainer is continued.
        live: and it left the sampler in this process.
    """

    fewest = 1
    joins = continues_fit = live = False

    def __init__(
        self,
        source: Source,
        batch_size: int,
        accumulation: int = 1,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        broadcast: Callable[[Any], Any] = lambda value: value,
        total: Callable[[int], int] = lambda value: value,
        gather: Callable[[Any], list[Any]] | None = None,
        drop_last: bool | None = None,
        per_sample_rng: bool = False,
        evaluation: bool = False,
        pin: bool = False,
        repeats: bool = False,
        keeps_size: bool = False,
    ) -> None:
        self.source, self.batch_size, self.accumulation = source, batch_size, accumulation
        self.rank, self.size, self.seed = rank, size, seed
        self.global_batch_size = batch_size * accumulation * size
        self.drop_last = not evaluation and (source.drop_last if drop_last is None else drop_last)
        self.evaluation, self._keeps_size = evaluation, keeps_size
        self._repeats, self._resumed = repeats, False
        self._drawn: SamplerOrder | None = None
        if source.is_map and source.sampler is not None:
            # Validation sets are drawn once.
            self._drawn = SamplerOrder(source, seed, rank, broadcast, gather)
        self._keyed: bool | None = None
        self._batches = Batches()
        self._per_sample_rng = per_sample_rng
        self._samples = Samples(source.dataset, source.collate_fn, seed, per_sample_rng)
        self._pins = pin or bool(source.options.get("pin_memory"))
        self._loader: DataLoader[Any] | None = None
        self._end: int | None = None
        self._ahead, self._restored = Ahead(iter(())), None
        self._reader = StreamReader(
            source,
            batch_size,
            accumulation,
            rank=rank,
            size=size,
            seed=seed,
            drop_last=self.drop_last,
            keep_state=not evaluation,
            total=total,
            gather=gather,
        )

    @property
    def num_samples(self) -> int | None:
        """Samples that one epoch uses; None if unknown before reading."""
        length = self.source.length
        if length is None or not self.drop_last:
            return length
        return length - length % self.global_batch_size

    @property
    def num_windows(self) -> int | None:
        """Optimizer steps in one epoch; None if unknown before reading."""
        length = self.num_samples
        return None if length is None else -(-length // self.global_batch_size)

    def deal(self, fewest: int, joins: bool = False) -> None:
        """Set how the last windows are divided, which depends on the model."""
        self.fewest, self.joins = fewest, joins

    def windows(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """The windows of `epoch` after the first `start` samples.

        `start` lies on a window boundary of some number of ranks; on another number of
        ranks the windows simply begin there (C4).
        """
        self._samples.begin(epoch)
        if not self.source.is_map:
            self._end, self._ahead = None, Ahead(self._stream(epoch, start))
            return self._ahead
        drawn = None if self._drawn is None else self._drawn.epoch(epoch)
        if self._drawn is not None and drawn is None:
            if self.evaluation:
                raise UserError("its sampler has no end", field=self.source.argument, allowed="an end")
            self._end, self._ahead = None, Ahead(self._endless(self._drawn, epoch, start))
            return self._ahead
        if self.source.order == "batch_sampler":
            return self._ready_batches(drawn or [], epoch, start)
        order = self._order(drawn, epoch)
        length = len(self.source.dataset) if order is None else len(order)
        self._end = length - (length - start) % self.global_batch_size if self.drop_last else length
        tensors = self.source.tensors
        if tensors is not None and not self._per_sample_rng and not isinstance(order, list):
            return self._indexed(tensors, order, start)
        return self._loaded(self._plan(order, start), epoch, start)

    @property
    def can_read_ahead(self) -> bool:
        """Whether a window can be read before it is needed: reading it draws no random numbers of this
        process, and no state of a stream moves."""
        in_memory = self.source.tensors is not None and not self._per_sample_rng
        known = self.source.is_map and self._end is not None
        return known and (in_memory or bool(self.source.options.get("num_workers")))

    @property
    def state(self) -> Any:
        """State, besides the cursor, that resumes a stream or a sampler without an end after the last window.
        None for other data with indices. The same on all ranks, unless the stream shards itself.
        """
        return self._ahead.state

    def restore(self, state: Any) -> None:
        """Let the next `windows` that does not begin at 0 resume from `state`."""
        # A checkpoint of an earlier version may hold a state that lost samples.
        lost = "dataset" in (state or {}) and loses_samples(self.source.dataset)
        self._restored = None if lost else state

    @property
    def batch(self) -> dict[str, int]:
        """How a global batch is divided, for a resumed run that chooses its micro-batch."""
        return {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "data_parallel_size": self.size,
        }

    @property
    def order(self) -> dict[str, Any] | None:
        """Name of the order with its ``seed`` and ``num_samples``, or of a sampler its position, for
        `continue_order`; None of streams and in evaluation."""
        source = self.source
        if self.evaluation or not source.is_map:
            return None
        if self._drawn is not None:
            return {"name": _SAMPLER, "position": self._drawn.position}
        length = len(source.dataset)
        if source.order == "sequential":
            return {"name": _SEQUENTIAL, "num_samples": length}
        keyed = length >= LARGE if self._keyed is None else self._keyed
        return {"name": _KEYED if keyed else _RANDPERM, "seed": self.seed, "num_samples": length}

    def continue_order(self, saved: Mapping[str, Any] | None, inside: int | None = None) -> None:
        """Continue in the order of a run that saved `order`; with other data the run takes its own.

        Args:
            inside: the epoch that the position is within; None between two.

        Raises:
            UserError: another version of this package saved it, and this one does not know the order; or
                within an epoch, order, seed or data are others, so that samples would be missed and repeated.
        """
        if inside is not None:
            self._samples.begin(inside)  # the length of the data may depend on it
        own, options = self.order, self.source.options
        # Workers that are made in each epoch begin with what this process has.
        made_anew = bool(options.get("num_workers")) and not options.get("persistent_workers")
        self._resumed = inside is not None or not made_anew
        if own is None or saved is None:
            return
        if saved["name"] not in (_RANDPERM, _KEYED, _SAMPLER, _SEQUENTIAL):
            raise UserError(
                "the checkpoint's run reads its samples in an order that this version does not know",
                field="resume_from_checkpoint",
                got=saved["name"],
                allowed=f"{_RANDPERM}, {_KEYED}, {_SAMPLER}, {_SEQUENTIAL}",
                remedy="Resume with the version of distributed-trainer that saved it, or a later one",
            )
        if inside is not None:
            self._check_same(own, saved)
        if self._drawn is not None and saved["name"] == _SAMPLER:
            strict = inside is not None or (self._repeats and not self.continues_fit)
            self._drawn.continue_from(saved.get("position", {}), strict, self.continues_fit, self.live)
        elif saved["name"] in (_RANDPERM, _KEYED) and saved.get("num_samples") in (
            None,
            own.get("num_samples"),
        ):
            self._keyed = saved["name"] == _KEYED

    def _check_same(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        own, saved = ({**o, "name": _RANDPERM if o["name"] == _KEYED else o["name"]} for o in (own, saved))
        data = self.source.argument
        for name, field in {"name": data, "seed": "seed", "num_samples": data}.items():
            if own.get(name) == saved.get(name, own.get(name)):
                continue
            raise UserError(
                "the epoch under way was begun in another order, so that some samples would be missed and"
                " others repeated",
                field=field,
                got=f"{'order' if name == 'name' else name.replace('_', ' ')} {own[name]}",
                allowed=f"{saved[name]}, as where it was begun",
                remedy="Continue with the same order, seed and data, or from the end of an epoch",
            )

    def rewind(self) -> None:
        """Leave a user's sampler as it was before `windows` was called."""
        if self._drawn is not None:
            self._drawn.rewind()

    @property
    def rereads(self) -> bool:
        """Whether resuming means to read and skip the samples that were read before."""
        return not self.source.is_map and "dataset" not in (self._restored or {})

    @property
    def num_read(self) -> int | None:
        """Samples of the epoch that `windows` began; None of streams, and without an end."""
        return self._end

    def ended(self, samples: int) -> bool:
        """Whether the first `samples` of the epoch that `windows` began are all that it yields.

        A stream is read one window ahead for this, which for one that shards itself every
        rank has to ask together.
        """
        return self._ahead.ended() if self._end is None else samples >= self._end

    def _order(self, drawn: list[Any] | None, epoch: int) -> torch.Tensor | KeyedOrder | list[Any] | None:
        """Sample indices of the epoch; None stands for 0, 1, 2, ...

        Args:
            drawn: by a user's sampler: indices, names or (index, size) pairs.
        """
        source = self.source
        if drawn is not None:
            if not all(isinstance(index, int) for index in drawn):
                return drawn
            order = torch.tensor(drawn, dtype=torch.int64)
            # Of tensors, which are read together, negative ones count from the end.
            return order if source.tensors is None else order.where(order >= 0, order + len(source.dataset))
        if source.order == "sequential" or self.evaluation:
            return None
        return shuffled_order(len(source.dataset), self.seed, epoch, self._keyed)

    def _endless(self, drawn: SamplerOrder, epoch: int, start: int) -> Iterator[tuple[Window, Any]]:
        """(window, digest of what was drawn up to its end) of a sampler without an end."""
        whole = self.source.order == "batch_sampler"
        size = self.accumulation * self.size if whole else self.global_batch_size
        state: Any = self._restored if start else None
        self._restored = None
        digests: deque[str] = deque()

        def plan() -> Iterator[tuple[int, list[tuple[list[Any], int]]]]:
            for window, digest in drawn.windows(epoch, start, size, (state or {}).get("drawn", "")):
                if len(window) < size and self.drop_last:
                    return
                digests.append(digest)
                yield from self._dealt_batches(window) if whole else self._dealt(window, 0)

        for window in self._loaded(plan(), epoch, start):
            yield window, {"drawn": digests.popleft()}

    @property
    def _fewest(self) -> int:
        return min(self.fewest, self.batch_size)

    def _spans(self, length: int, start: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Per window from `start`: samples over all ranks, and this rank's micro-batches as (first position,
        end, samples that count)."""
        size = self.global_batch_size
        fewest = self._fewest * self.size * self.evaluation
        for count in window_sizes(max(length - start, 0), size, fewest, self.joins):
            if count < size and self.drop_last:
                return
            spans = []
            most = max(self.batch_size, -(-count // (self.size * self.accumulation)))
            for begin, end in split_window(count, self.rank, self.size, most, self._fewest):
                low, high = (begin, end) if end > begin else (0, min(count, self.batch_size))
                spans.append((start + low, start + high, end - begin))
            yield count, spans
            start += count

    def _dealt(
        self, order: torch.Tensor | KeyedOrder | list[Any] | None, start: int
    ) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
        """Per window: samples over all ranks, and this rank's micro-batches as (indices, samples that count).

        Without an order, indices are a slice.
        """
        windows = self._spans(len(self.source.dataset) if order is None else len(order), start)
        if isinstance(order, torch.Tensor) and not self.evaluation:
            start = yield from self._dealt_together(order, start)
            windows = self._spans(len(order), start)
        if not isinstance(order, KeyedOrder):
            for count, spans in windows:
                found = ((slice(low, high), number) for low, high, number in spans)
                yield count, [(where if order is None else order[where], number) for where, number in found]
            return
        num_ahead = max(_AHEAD // (self.batch_size * self.accumulation), 1)
        while ahead := list(islice(windows, num_ahead)):
            pieces = order.pieces([(low, high) for _, spans in ahead for low, high, _ in spans])
            for count, spans in ahead:
                yield count, [(next(pieces), number) for *_, number in spans]

    def _dealt_together(
        self, order: torch.Tensor, start: int
    ) -> Generator[tuple[int, list[tuple[Any, int]]], None, int]:
        """`_dealt` of full windows, several at once: one by one each costs a slice and its arithmetic.

        Returns:
            Where it ends.
        """
        size = self.global_batch_size
        own = split_window(size, self.rank, self.size, self.batch_size)
        while (num := min((len(order) - start) // size, max(_TOGETHER // size, 1))) > 0:
            windows = order[start : start + num * size].view(num, size)
            parts = [windows[:, low:high].unbind() for low, high in own]
            numbers = [high - low for low, high in own]
            for micro_batches in zip(*parts, strict=True):
                start += size
                yield size, list(zip(micro_batches, numbers, strict=True))
        return start

    def _indexed(
        self, tensors: tuple[torch.Tensor, ...], order: torch.Tensor | KeyedOrder | None, start: int
    ) -> Iterator[Window]:
        """In-memory tensors are indexed a batch at a time: no per-sample fetch, no collate."""
        pins = self._pins and torch.cuda.is_available()
        readers = [reader_of(tensor, pins, ranges=order is None) for tensor in tensors]
        for count, micro_batches in self._dealt(order, start):
            made = [MicroBatch([read(where) for read in readers], number) for where, number in micro_batches]
            yield Window(made, count)

    def _plan(
        self, order: torch.Tensor | KeyedOrder | list[Any] | None, start: int
    ) -> Iterator[tuple[int, list[tuple[list[Any], int]]]]:
        """`_dealt` with lists of indices, of several windows at once: one by one, between steps of training,
        costs several times as much, because the processor's caches hold other code and data by then."""
        windows = (
            (count, [(_listed(where), number) for where, number in micro_batches])
            for count, micro_batches in self._dealt(order, start)
        )
        num_ahead = max(_PLANNED // (self.batch_size * self.accumulation), 1)
        while ahead := list(islice(windows, num_ahead)):
            yield from ahead

    def _loaded(
        self, plan: Iterator[tuple[int, list[tuple[list[Any], int]]]], epoch: int, start: int
    ) -> Iterator[Window]:
        """Windows through a DataLoader, whose workers run ahead of the loop."""
        # The loader draws indices ahead of what has been yielded, so the shape of each
        # window waits in a queue beside it.
        windows: deque[tuple[int, list[int]]] = deque()
        # Without a reference to this feed, so that persistent workers end with it.
        rank, compares = self.rank, self._repeats and self._resumed
        self._resumed = False

        def draw() -> Iterator[list[Any]]:
            nonlocal compares
            position = start
            for count, micro_batches in plan:
                windows.append((count, [number for _, number in micro_batches]))
                for number, (indices, _) in enumerate(micro_batches):
                    yield [(epoch, f"{position} {rank} {number}", compares), *indices]
                    compares = False
                position += count

        self._batches.source = draw
        batches = read(self._dataloader(epoch), self.source.argument)
        for head in batches:
            if isinstance(head, UserError):
                raise head
            count, numbers = windows.popleft()
            rest = [next(batches) for _ in numbers[1:]]
            yield Window([MicroBatch(b, n) for b, n in zip([head, *rest], numbers, strict=True)], count)

    def _ready_batches(self, drawn: list[Any], epoch: int, start: int) -> Iterator[Window]:
        """A user's batch sampler: its batches stay whole and are dealt out in order."""
        batches = [list(batch) for batch in drawn]
        done = sum(end <= start for end in accumulate(map(len, batches)))
        per_window = self.accumulation * self.size
        if self.drop_last:
            del batches[len(batches) - (len(batches) - done) % per_window :]
        self._check_sizes(batches[:-1])
        self._end = sum(map(len, batches))
        windows = (batches[first : first + per_window] for first in range(done, len(batches), per_window))
        return self._loaded(chain.from_iterable(map(self._dealt_batches, windows)), epoch, start)

    def _check_sizes(self, batches: list[list[Any]]) -> None:
        others = {len(batch) for batch in batches} - {self.batch_size}
        if self._keeps_size and others:
            raise UserError(
                "the batch sampler yields batches of another size than in the beginning, by which the"
                " global batch and the learning rate were planned",
                field=self.source.argument,
                got=f"{others.pop()} samples",
                allowed=f"{self.batch_size} samples in all batches but the last",
                remedy="Leave global_batch_size and lr_scaling out, or let all batches have the same size",
            )

    def _dealt_batches(self, window: list[Any]) -> Iterator[tuple[int, list[tuple[list[Any], int]]]]:
        spans = split_window(len(window), self.rank, self.size, 1)
        batches = [list(batch) for batch in window]
        micro_batches = [(batches[a], len(batches[a])) if b > a else (batches[0], 0) for a, b in spans]
        yield sum(map(len, batches)), micro_batches

    def _stream(self, epoch: int, start: int) -> Iterator[tuple[Window, Any]]:
        """An iterable dataset: every rank reads the stream and keeps its own slices."""
        if self._per_sample_rng:
            raise UserError(
                "an iterable dataset has no sample index to tie randomness to",
                field="data.per_sample_rng",
                got=True,
                allowed="false for iterable datasets",
            )
        state, self._restored = self._restored if start else None, None
        self._reader.fewest = self._fewest
        return self._reader.windows(epoch, start, state)

    def _dataloader(self, epoch: int) -> DataLoader[Any]:
        if self._loader is None:
            options = self.source.options
            self._loader = DataLoader(
                self._samples,
                batch_size=None,
                sampler=self._batches,
                collate_fn=same,
                generator=torch.Generator(),
                **{**options, "worker_init_fn": partial(begin_worker, options.get("worker_init_fn"))},
            )
        self._loader.generator = loader_generator(self.seed, epoch, self.rank)
        return self._loader


def _listed(where: torch.Tensor | slice | list[Any]) -> list[Any]:
    if isinstance(where, torch.Tensor):
        found: list[Any] = where.tolist()
        return found
    return list(range(where.start, where.stop)) if isinstance(where, slice) else where
