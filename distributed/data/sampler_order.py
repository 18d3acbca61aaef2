"""SamplerOrder: what a user's sampler draws, epoch after epoch, and again after a restart."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from distributed.data.fingerprint import fingerprint
from distributed.data.order import epoch_seed
from distributed.data.sample_rng import RandomStreams
from distributed.data.samplers import are_parts, copied_sampler, inner_samplers, length_of
from distributed.data.samples import set_epoch
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.data.source import Source

__all__ = ["SamplerOrder"]

logger = logging.getLogger("distributed")

_CHUNK = 1 << 12
"""Indices of a sampler without an end that are drawn and sent at once, about."""

_UNKNOWN = 1 << 20
"""Indices after which a sampler whose length is unknown, or less, is taken for one without an end."""

_WHOLE = 1 << 24
"""Length from which on an order is read as one without an end."""

_ORIGINS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Sampler of this process -> a copy of it as it was before its first draw here."""


class SamplerOrder:
    """The order of a sampler or batch sampler, which may have random numbers or a history of its own.

    Rank 0 draws an epoch under a seed of its own, and sends it. A digest of the epochs is part of the cursor.
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
        self._holds_batches = source.order == "batch_sampler"
        self._position: dict[str, Any] = {}
        self._saved: tuple[Mapping[str, Any], bool, bool, bool] | None = None
        self._last: list[Any] | None = []
        self._endless: Iterator[Any] = iter(())
        self._agreed: bool | None = None

    @property
    def position(self) -> dict[str, Any]:
        """``epochs`` drawn so far, the ``first`` of them, and their ``digest``; empty before any."""
        return dict(self._position)

    def continue_from(self, saved: Mapping[str, Any], strict: bool, continues_fit: bool, live: bool) -> None:
        """Let `epoch` find the order of the run that saved `position`.

        Args:
            strict: refuse another order. Otherwise the sampler's order begins here.
            continues_fit: the run was an earlier `fit` of the same trainer.
            live: and left the sampler in this process.
        """
        self._saved = (saved, strict, continues_fit, live) if "digest" in saved else None

    # -- epochs with an end --------------------------------------------------------------

    def epoch(self, epoch: int) -> list[Any] | None:
        """Indices, or batches of them, of `epoch`; None without an end, see `windows`. Collective.

        Raises:
            UserError: the sampler drew nothing; it drew other samples before the run was saved; or each rank
                draws a part of the data.
        """
        if self._saved is not None:
            self._draw_again(epoch, *self._saved)
            self._saved = None
        if not self._position:
            self._position = {"first": epoch, "epochs": epoch, "digest": ""}
            self._keep_origin(anew=True)
        if self._position["epochs"] <= epoch:
            self._draw(epoch)
        if self._last == []:
            raise UserError("its sampler drew no sample", field=self.source.argument)
        return self._last

    def _draw(self, epoch: int) -> None:
        """Draw an epoch, or begin to draw one without an end. Collective."""
        drawn = self._begun(self._sampler, epoch) if self.rank == 0 or self._gather is not None else []
        head = drawn if isinstance(drawn, list) else list(islice(drawn, _CHUNK))
        ends, digest = head is drawn, _digest(head)
        agreed = self._gather is not None and self._compare(head, digest, epoch)
        self._endless = iter(()) if ends or self.rank else chain(head, drawn)
        own = (head if ends else None), digest
        self._last, digest = own if agreed and ends else self._broadcast(None if self.rank else own)
        if self._last is not None:
            self._position = _after(self._position, epoch, digest)

    def _begun(self, sampler: Any, epoch: int) -> list[Any] | Iterator[Any]:
        """Indices or batches that `sampler` draws in `epoch`: a list, or an iterator without an end."""
        length = length_of(sampler) or 0
        opened, limit = self._opened(sampler, epoch), max(length, _UNKNOWN) if length <= _WHOLE else 0
        drawn: list[Any] = []
        number = 0
        for item in opened if limit else ():
            drawn.append(item)
            number += len(item) if self._holds_batches else 1
            if number > limit:
                return chain(drawn, opened)
        return drawn if limit else opened

    def _opened(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """What `sampler` yields in `epoch`, drawn under the epoch's seed."""
        streams = RandomStreams(epoch_seed(self.seed, epoch))
        with streams:
            for part in reversed(inner_samplers(sampler)):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                generator = getattr(part, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(epoch_seed(self.seed, epoch))
            drawn = iter(sampler)
        return _in_chunks(drawn, streams, 1 if self._holds_batches else _CHUNK)

    # -- after a restart -----------------------------------------------------------------

    def _draw_again(
        self, epoch: int, saved: Mapping[str, Any], strict: bool, continues_fit: bool, live: bool
    ) -> None:
        """Bring the sampler to where the saved run had it. Collective.

        Raises:
            UserError: `strict`, and it draws other samples.
        """
        own = self._found(saved, live) if self.rank == 0 or self._gather is not None else None
        set_epoch(self.source.dataset, self.seed, epoch)  # again, where another one was looked at
        found = self._broadcast(own)
        if found is not None:
            self._position, self._last = dict(saved), found
            self._agreed = self._gather and all(self._gather(own is not None))
        elif strict:
            raise self._other_samples(f"epochs {saved['first']} to {saved['epochs'] - 1}", continues_fit)
        else:
            logger.info("%s: the order of its sampler begins here", self.source.argument)

    def _found(self, saved: Mapping[str, Any], live: bool) -> list[Any] | None:
        """The last epoch of the saved run, if the sampler draws the same again, as it is or as it was before
        its first draw in this process; None if not."""
        origin = self._origin()
        candidates = [each for each in (origin, self._sampler) if each is not None]
        # Orders may depend on the dataset's epoch; it is moved only where they do.
        ways = [(s, tells) for tells in (False, True) for s in candidates]
        for sampler, tells in ways if hasattr(self.source.dataset, "set_epoch") else ways[: len(candidates)]:
            drawing = copied_sampler(sampler, self.source.dataset)
            position, last = {"first": saved["first"], "epochs": saved["first"], "digest": ""}, []
            for epoch in range(saved["first"], saved["epochs"]):
                if tells:
                    set_epoch(self.source.dataset, self.seed, epoch)
                drawn = self._begun(drawing, epoch)
                last = drawn if isinstance(drawn, list) else []
                position = _after(position, epoch, _digest(drawn))
            if position == dict(saved):
                if sampler is self._sampler or not live:
                    self._keep_origin()
                    self._become(drawing)
                return last
        return None

    def _origin(self) -> Any:
        """A copy of the sampler as it was before its first draw in this process; None without."""
        with suppress(TypeError):  # not hashed
            return _ORIGINS.get(self._sampler)
        return None

    def _keep_origin(self, anew: bool = False) -> None:
        with suppress(TypeError):  # neither hashed nor referred to weakly
            if anew or self._sampler not in _ORIGINS:
                _ORIGINS[self._sampler] = copied_sampler(self._sampler, self.source.dataset)

    def rewind(self) -> None:
        """Leave the sampler as it was before its first draw in this process."""
        origin = self._origin()
        if self._position and origin is not None:
            self._become(copied_sampler(origin, self.source.dataset))
        self._position, self._agreed = {}, None

    def _become(self, drawn: Any) -> None:
        """Give the user's sampler, which callbacks may hold, the state of a copy of it."""
        if hasattr(self._sampler, "__dict__") and drawn is not self._sampler:
            vars(self._sampler).update(vars(drawn))
        else:
            self._sampler = drawn

    def _other_samples(self, where: str, continues_fit: bool = False) -> UserError:
        before = "before the checkpoint was saved, so that the run cannot continue its order"
        allowed = "a sampler that draws the same again from its beginning"
        remedy = (
            "Seed its random numbers where it is made, or in set_epoch(epoch), and give it the data and the"
            " weights of the run that saved; or start without resume_from_checkpoint"
        )
        if continues_fit:
            before = "that of the fit before, which ended within an epoch"
            allowed = "the loader of the fit before"
            remedy = "End the epoch with that loader, by epochs in place of max_steps; or train with this one"
            remedy += " by another Trainer"
        return UserError(
            f"the sampler drew other samples in {where} than {before}",
            field=self.source.argument,
            got=type(self.source.sampler).__name__,
            allowed=allowed,
            remedy=remedy,
        )

    # -- ranks that draw parts -----------------------------------------------------------

    def _compare(self, drawn: list[Any], digest: str, epoch: int) -> bool:
        """Refuse a sampler of which each rank draws a part, or which each has changed. Collective.

        Args:
            drawn: by this rank, at least the beginning of the epoch.

        Returns:
            True if all ranks drew the same.
        """
        assert self._gather is not None
        agreed = len(set(self._gather(digest))) == 1
        if not agreed and self._agreed is None and hasattr(self.source.dataset, "__len__"):
            self._check_parts(drawn)
        # A callback on rank 0 alone may change its sampler, which all ranks follow.
        elif not (agreed or not self._agreed or all(self._gather(self._follows(digest, epoch)))):
            raise UserError(
                f"the ranks draw different samples in epoch {epoch}, and the same before it: what the sampler"
                " draws by has changed on each rank by itself",
                field=self.source.argument,
                got=type(self._sampler).__name__,
                allowed="a sampler that draws the same indices on every rank, or is changed on rank 0 alone",
                remedy="Give what changes it to all ranks, for example by torch.distributed.all_gather_object"
                " in training_step; or set data.verify=false to follow the sampler of rank 0",
            )
        self._agreed = agreed and self._agreed is not False
        return agreed

    def _follows(self, digest: str, epoch: int) -> bool:
        """True on rank 0, and where drawing alone has changed the sampler, which drew `digest` in `epoch`."""
        drawing: Any = copied_sampler(self._origin(), self.source.dataset)
        if self.rank == 0 or drawing is None:
            return self.rank == 0
        for each in range(self._position.get("first", epoch), epoch):
            _digest(self._begun(drawing, each))
        drawn = self._begun(drawing, epoch)
        return _digest(drawn if isinstance(drawn, list) else islice(drawn, _CHUNK)) == digest

    def _check_parts(self, drawn: list[Any]) -> None:
        assert self._gather is not None
        total, size = len(self.source.dataset), len(set(self._gather(self.rank)))
        indices = (i for part in drawn for i in (part if self._holds_batches else [part]))
        # What an epoch of a part has, also where the sampler continues after it.
        own = set(map(repr, islice(indices, min(-(-total // size), _UNKNOWN))))
        parts = dict(self._gather((self.rank, own)))
        drawn_by_all = set().union(*parts.values())
        # Of the whole data each sample once, but for padding or what is dropped at its end.
        repeated = sum(map(len, parts.values())) - len(drawn_by_all)
        covers = repeated <= -total % size and len(drawn_by_all) >= total - total % size
        if size > 1 and (covers or all(are_parts(parts[0], parts[r], total, size) for r in parts if r)):
            raise UserError(
                "the sampler draws another part of the data on each rank, and that of rank 0 would be dealt"
                " out to all ranks",
                field=self.source.argument,
                got=f"{type(self._sampler).__name__}, {len(parts[0])} of {total} samples on rank 0",
                allowed="a sampler that draws the same indices on every rank",
                remedy="Make it for a world of one (num_replicas=1, rank=0): each rank gets a part",
            )

    # -- without an end ------------------------------------------------------------------

    def windows(self, epoch: int, start: int, size: int, digest: str) -> Iterator[tuple[list[Any], str]]:
        """(indices or batches of a window, digest up to its end) of an epoch without an end. Collective.

        Args:
            start: samples to pass over.
            size: indices or batches of a window.
            digest: of what is passed over; empty does not compare it.

        Raises:
            UserError: the sampler drew others before the run was saved.
        """
        hashed, passed = hashlib.blake2b(digest_size=16), 0
        while self.rank == 0 and passed < start and (drawn := list(islice(self._endless, 1))):
            hashed.update(_text(drawn))
            passed += len(drawn[0]) if self._holds_batches else 1
        if digest and self._broadcast(hashed.hexdigest()) != digest:
            raise self._other_samples(f"the first {start} draws")
        while ahead := self._broadcast(self._ahead(size, hashed)):
            yield from ahead
        self._position = _after(self._position, epoch, self._broadcast(hashed.hexdigest()))

    def _ahead(self, size: int, hashed: Any) -> list[tuple[list[Any], str]]:
        found = []
        for _ in range(max(_CHUNK // size, 1)):
            window = list(islice(self._endless, size))
            if not window:
                break
            hashed.update(_text(window))
            found.append((window, hashed.hexdigest()))
        return found


def _in_chunks(drawn: Iterator[Any], streams: RandomStreams, size: int) -> Iterator[Any]:
    while True:
        with streams:
            chunk = list(islice(drawn, size))
        if not chunk:
            return
        yield from chunk


def _after(position: Mapping[str, Any], epoch: int, digest: str) -> dict[str, Any]:
    """`position` behind `epoch`, which has `digest`."""
    return {**position, "epochs": epoch + 1, "digest": fingerprint([position["digest"], digest])}


def _digest(drawn: Iterable[Any]) -> str:
    """Digest of indices or batches, which are drawn for it."""
    hashed, rest = hashlib.blake2b(digest_size=16), iter(drawn)
    while chunk := list(islice(rest, _CHUNK)):
        hashed.update(_text(chunk))
    return hashed.hexdigest()


def _text(drawn: list[Any]) -> bytes:
    # NumPy shortens the repr of long arrays.
    plain = (each.tolist() if hasattr(each, "tolist") else each for each in drawn)
    return "".join(f"{each!r}," for each in plain).encode()
