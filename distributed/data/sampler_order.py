"""SamplerOrder: what a user's sampler draws, epoch after epoch, and again after a restart."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from distributed.data.fingerprint import fingerprint
from distributed.data.order import epoch_seed
from distributed.data.sample_rng import RandomStreams
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.data.source import Source

__all__ = ["SamplerOrder", "size_of_batches"]

_CHUNK = 1 << 12
"""Indices of a sampler without an end that are drawn and sent at once, about."""

_UNKNOWN = 1 << 20
"""Indices after which a sampler whose length is unknown, or less, is taken for one without an end."""

_LOOKED_AT = 256
"""Batches whose size is looked at before a run."""

_WHOLE = 1 << 24
"""Length from which on an order is read as one without an end."""

_DRAWN: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Sampler of this process -> the last position of an order over it, and a copy as it was before."""


class SamplerOrder:
    """The order of a sampler or batch sampler with random numbers or a history of its own.

    Rank 0 draws an epoch under a seed of its own, and sends it. A digest of all epochs is part of the cursor.
    A resumed run draws the epochs before it again, and compares the digest.

    Args:
        source: with a sampler.
        seed: of the run.
        rank: data-parallel rank.
        broadcast: rank 0's object on every rank.
        gather: the objects of all ranks; None does not compare what ranks draw.
    """

    def __init__(
        self,
        source: Source,
        seed: int,
        rank: int,
        broadcast: Callable[[Any], Any],
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.source, self.seed, self.rank = source, seed, rank
        self._sampler, self._broadcast, self._gather = source.sampler, broadcast, gather
        self._position: dict[str, Any] = {"epochs": 0, "digest": ""}
        self._saved: Mapping[str, Any] | None = None
        self._last: list[Any] | None = []
        self._endless: Iterator[Any] = iter(())

    @property
    def position(self) -> dict[str, Any]:
        """``epochs`` drawn so far, and the ``digest`` of all of them."""
        return dict(self._position)

    def continue_from(self, saved: Mapping[str, Any]) -> None:
        """Let `epoch` find the order of the run that saved `position`."""
        self._saved = saved if "digest" in saved else None

    def epoch(self, epoch: int) -> list[Any] | None:
        """Indices, or batches of them, of `epoch`; None without an end, see `windows`. Collective.

        Raises:
            UserError: the sampler drew nothing; it drew other samples before the run was saved; or each rank
                draws a part of the data.
        """
        saved, self._saved = self._saved, None
        if saved is not None:
            self._draw_again(saved)
        elif self._position["epochs"] == 0:
            self._remember()
            self._check_whole(epoch)
        if self._position["epochs"] <= epoch:
            self._draw(epoch)
        if self._last == []:
            raise UserError("its sampler drew no sample", field=self.source.argument)
        return self._last

    def _draw(self, epoch: int) -> None:
        """Draw an epoch, or begin to draw one without an end. Collective."""
        drawn: list[Any] | None = None
        if self.rank == 0:
            opened = self._opened(epoch)
            drawn = list(islice(opened, self._limit))
            after = list(islice(opened, 1))
            if after or self._limit == 0:
                self._endless, drawn = chain(drawn, after, opened), None
        self._last = self._broadcast(drawn)
        if self._last is not None:
            digest = fingerprint([self._position["digest"], *_as_tensors(self._last)])
            self._position = {"epochs": epoch + 1, "digest": digest}
        if self._is_known():
            _DRAWN[self._sampler] |= self._position

    @property
    def _limit(self) -> int:
        """Indices up to which the order of an epoch is kept."""
        try:
            length = len(self._sampler)
        except (TypeError, NotImplementedError):
            return _UNKNOWN
        return max(length, _UNKNOWN) if length <= _WHOLE else 0

    def _opened(self, epoch: int) -> Iterator[Any]:
        """What the sampler yields in `epoch`, drawn under the epoch's seed."""
        streams = RandomStreams(epoch_seed(self.seed, epoch))
        with streams:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            generator = getattr(self._sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(epoch_seed(self.seed, epoch))
            drawn = iter(self._sampler)
        while True:
            with streams:
                chunk = list(islice(drawn, _CHUNK))
            if not chunk:
                return
            yield from chunk

    def _draw_again(self, saved: Mapping[str, Any]) -> None:
        """Bring the sampler to where the saved run had it. Collective."""
        known = _DRAWN.get(self._sampler, {}) if self._is_known() else {}
        if self._broadcast({name: known.get(name) for name in saved} == dict(saved)):
            self._position = dict(saved)  # an earlier `fit` of this process ended here
            return
        for origin in (self._sampler, known.get("origin")):
            if not self._broadcast(origin is not None):
                continue
            self._sampler, self._position = _copied(origin, self.source.dataset), {"epochs": 0, "digest": ""}
            for epoch in range(saved["epochs"]):
                self._draw(epoch)
            if self._position == saved:
                return
        raise self._other_samples(f"the first {saved['epochs']} epochs")

    def _remember(self) -> None:
        with suppress(TypeError):  # without a hash or weak references, a second run starts from what is there
            _DRAWN[self._sampler] = {"origin": _copied(self._sampler, self.source.dataset)}

    def _is_known(self) -> bool:
        try:
            return self._sampler in _DRAWN
        except TypeError:
            return False

    def _check_whole(self, epoch: int) -> None:
        """Refuse a sampler of which each rank draws a part. Collective."""
        if self._gather is None:
            return
        own, self._sampler = self._sampler, _copied(self._sampler, self.source.dataset)
        drawn = [] if self._sampler is own else _flat(islice(self._opened(epoch), _UNKNOWN))
        parts = [set(part) for part in self._gather(drawn)]
        self._sampler = own
        together = set().union(*parts)
        if len(parts) > 1 and all(parts) and len(together) == sum(map(len, parts)) > 0.9 * self._num_samples:
            raise UserError(
                "the sampler draws another part of the data on each rank, and that of rank 0 would be dealt"
                " out to all ranks",
                field=self.source.argument,
                got=f"{type(own).__name__}, {len(parts[0])} of {len(together)} samples on rank 0",
                allowed="a sampler that draws the same indices on every rank",
                remedy="Make it for a world of one (num_replicas=1, rank=0): each rank gets a part",
            )

    @property
    def _num_samples(self) -> int:
        return len(self.source.dataset) if hasattr(self.source.dataset, "__len__") else 0

    def windows(self, start: int, size: int, digest: str) -> Iterator[tuple[list[Any], str]]:
        """(indices or batches of a window, digest up to its end) of an epoch without an end. Collective.

        Args:
            start: samples to pass over.
            size: indices or batches of a window.
            digest: of what is passed over; empty does not compare it.

        Raises:
            UserError: the sampler drew others before the run was saved.
        """
        hashed, passed = hashlib.blake2b(digest_size=16), 0
        while self.rank == 0 and passed < start:
            drawn = next(self._endless)
            hashed.update(f"{drawn!r},".encode())
            passed += len(drawn) if self.source.order == "batch_sampler" else 1
        if digest and self._broadcast(hashed.hexdigest()) != digest:
            raise self._other_samples(f"its first {start} draws")
        while ahead := self._broadcast(self._ahead(size, hashed)):
            yield from ahead

    def _ahead(self, size: int, hashed: Any) -> list[tuple[list[Any], str]]:
        found = []
        for _ in range(max(_CHUNK // size, 1)):
            window = list(islice(self._endless, size))
            if not window:
                break
            hashed.update("".join(f"{drawn!r}," for drawn in window).encode())
            found.append((window, hashed.hexdigest()))
        return found

    def _other_samples(self, where: str) -> UserError:
        return UserError(
            f"the sampler drew other samples in {where} than before the checkpoint was saved, so that some"
            " would be missed and others repeated",
            field=self.source.argument,
            got=type(self.source.sampler).__name__,
            allowed="a sampler that draws the same again from its beginning",
            remedy="Seed its random numbers where it is made, or in set_epoch(epoch), and give it the data"
            " and the weights of the run that saved; or start without resume_from_checkpoint",
        )


def size_of_batches(batches: Any, dataset: Any) -> int | None:
    """Size of a batch sampler's batches but the last, as a copy of it draws them; None if they differ."""
    with RandomStreams(0):
        copied = _copied(batches, dataset)
        sizes = [] if copied is batches else [len(list(b)) for b in islice(copied, _LOOKED_AT)]
    whole = set(sizes[:-1] if len(sizes) < _LOOKED_AT else sizes) or set(sizes)
    (size,) = whole if len(whole) == 1 and max(sizes) in whole else (None,)
    return size


def _copied(sampler: Any, dataset: Any) -> Any:
    """A copy that shares the dataset and what it holds; the sampler itself where it cannot be copied."""
    shared = [dataset, *getattr(dataset, "__dict__", {}).values()]
    shared += [part for values in shared[1:] if isinstance(values, (list, tuple)) for part in values[:_CHUNK]]
    try:
        return copy.deepcopy(sampler, {id(part): part for part in shared})
    except Exception:  # noqa: BLE001 - whatever a class of the user raises
        return sampler


def _as_tensors(drawn: list[Any]) -> list[Any]:
    """`drawn` in a form that is digested fast."""
    plain = all(type(index) is int for index in drawn)
    return [torch.tensor(drawn, dtype=torch.int64)] if plain else drawn


def _flat(drawn: Iterable[Any]) -> list[str]:
    return [repr(index) for part in drawn for index in (part if isinstance(part, list) else [part])]
