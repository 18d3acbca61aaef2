"""What a rank is doing, kept where somebody else can read it: one small mapped file per rank.

A phase is entered by packing some fifty bytes into shared memory, without a system call, so that the
launcher can say of a rank that hangs or was killed what it did, and since when.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from distributed.system.private_files import draft_of

__all__ = [
    "ENDED",
    "FAILED",
    "JOURNAL_PHASES",
    "RUNNING",
    "Entry",
    "Journal",
    "current",
    "follow",
    "keep",
    "nowhere",
    "stop_noting",
]

JOURNAL_PHASES = (
    "setup",
    "prepare",
    "resume",
    "data",
    "forward",
    "backward",
    "optimizer",
    "record",
    "callback",
    "save",
    "epoch end",
    "validation",
    "finish",
    "communication",
    "idle",
)
"""In the order in which a step, an epoch and a run go through them."""

COLLECTIVES = ("", "all_reduce", "broadcast_object", "gather_objects", "barrier")
RUNNING, ENDED, FAILED = range(3)

_AFTER = ("record", "callback", "save", "epoch end", "validation", "finish")

_NUMBER = {name: index for index, name in enumerate(JOURNAL_PHASES)}
_KIND = {name: index for index, name in enumerate(COLLECTIVES)}
_RECORD = struct.Struct("=qqqqdBBBB")  # marks, step, epoch, collectives, since, phase, outer, kind, status
_OWNER = struct.Struct("=qQ")  # pid, thread
_SIZE, _OWNER_AT = 128, 64


@dataclass(frozen=True)
class Entry:
    """One rank's record, as read.

    Attributes:
        phase: of `JOURNAL_PHASES`.
        outer: the phase from which a collective was called; else `phase`.
        collective: which collective the rank is in, empty outside of ours.
        step: number of the step under way, from 1; 0 before the first.
        epoch: index of the epoch.
        marks: phases entered so far: a rank whose number grows moves.
        collectives: of the backend's interface entered so far.
        since: when the phase was entered, by this host's monotonic clock, in seconds.
        status: `RUNNING`, `ENDED` or `FAILED`.
        pid: of the rank.
        thread: of the training loop.
    """

    phase: str
    outer: str
    collective: str
    step: int
    epoch: int
    marks: int
    collectives: int
    since: float
    status: int
    pid: int
    thread: int

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """What the journal at `path` says; None when there is none, or nothing in it yet."""
        try:
            data = path.read_bytes()
            while data != (again := path.read_bytes()):
                data = again  # it was being written
        except OSError:
            return None
        if len(data) < _SIZE:
            return None
        marks, step, epoch, collectives, since, phase, outer, kind, status = _RECORD.unpack_from(data)
        pid, thread = _OWNER.unpack_from(data, _OWNER_AT)
        if not marks:
            return None
        names = JOURNAL_PHASES[phase], JOURNAL_PHASES[outer], COLLECTIVES[kind]
        return cls(*names, step, epoch, marks, collectives, since, status, pid, thread)

    def place(self) -> str:
        """Where the rank is, in words: ``forward of step 13 (epoch 0)``."""
        if self.phase == "communication":
            return (
                f"{self.collective} (its collective {self.collectives}), called in {self._where(self.outer)}"
            )
        return self._where(self.phase)

    def _where(self, phase: str) -> str:
        if self.step == 0:
            return f"{phase}, before the first step"
        if phase in _AFTER:
            name = "a callback" if phase == "callback" else phase
            return f"{name} after step {self.step} (epoch {self.epoch})"
        return f"{phase} of step {self.step} (epoch {self.epoch})"


class Journal:
    """One rank's own record. Not thread-safe: the training loop's thread owns it.

    Args:
        folder: private; the file is ``journal_<rank>`` there.
        rank: of this process.
    """

    __slots__ = ("_memory", "_status", "collectives", "epoch", "folder", "marks", "phase", "rank", "step")

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        # Half a first record would say that the rank has not moved since the host was started. Of half a
        # later one, the time and the phase still belong together, for they are written in this order.
        with draft_of(self.path(folder, rank)) as draft:
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.ftruncate(descriptor, _SIZE)
                self._memory = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
            self.marks = self.step = self.epoch = self.collectives = 0
            self._status = RUNNING
            _OWNER.pack_into(self._memory, _OWNER_AT, os.getpid(), threading.get_ident())
            self.phase = "idle"
            self.enter("idle")

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where that rank's journal is."""
        return folder / f"journal_{rank}"

    def begin(self) -> None:
        """A run begins in this thread: nothing is known of it yet."""
        self.step = self.epoch = self.collectives = 0
        self._status = RUNNING
        _OWNER.pack_into(self._memory, _OWNER_AT, os.getpid(), threading.get_ident())
        self.enter("setup")

    def enter(self, phase: str, step: int | None = None, epoch: int | None = None) -> str:
        """Note that `phase` begins, and the number of the step under way; returns the phase before."""
        if self._status:
            return phase
        before, self.phase = self.phase, phase
        if step is not None:
            self.step = step
        if epoch is not None:
            self.epoch = epoch
        self.marks += 1
        number = _NUMBER[phase]
        _RECORD.pack_into(
            self._memory,
            0,
            self.marks,
            self.step,
            self.epoch,
            self.collectives,
            perf_counter(),
            number,
            number,
            0,
            0,
        )
        return before

    def enter_collective(self, name: str) -> str:
        """Note that the collective `name` of the backend is entered; returns the phase before."""
        if self._status:
            return self.phase
        self.marks += 1
        self.collectives += 1
        outer = _NUMBER[self.phase]
        inside = _NUMBER["communication"]
        numbers = self.marks, self.step, self.epoch, self.collectives, perf_counter()
        _RECORD.pack_into(self._memory, 0, *numbers, inside, outer, _KIND[name], 0)
        return self.phase

    def end(self, status: int) -> None:
        """The run is over. What the rank did last stays; later phases are not noted."""
        if self._status == RUNNING:
            self._status = status
            struct.pack_into("=B", self._memory, _RECORD.size - 1, status)

    def entry(self) -> Entry | None:
        """What is on record."""
        return Entry.read(self.path(self.folder, self.rank))


_kept: list[Journal] = []


def keep(folder: Path, rank: int) -> Journal:
    """This process's journal in `folder`, begun anew for a run."""
    if not _kept or (_kept[0].folder, _kept[0].rank) != (folder, rank):
        _kept[:] = [Journal(folder, rank)]
    _kept[0].begin()
    return _kept[0]


def current() -> Journal | None:
    """This process's journal; None when nobody reads one."""
    return _kept[0] if _kept else None


def stop_noting() -> None:
    """The run has failed, if one was on record: what the rank does from now on is clearing up."""
    if _kept:
        _kept[0].end(FAILED)


def nowhere(phase: str, step: int | None = None, epoch: int | None = None) -> str:
    """Stands for `Journal.enter` where nobody reads a journal."""
    return phase


def follow(backend: Any, journal: Journal) -> None:
    """Note the phases and the collectives of `backend` in `journal` from now on.

    Its class becomes a subclass of itself, for a copy of the backend must not call the original's
    methods, as wrappers on the object would.
    """
    backend.timers.enter = journal.enter
    if backend.world.size > 1:
        kind = type(backend)
        methods = {name: _noted(kind, name, journal) for name in COLLECTIVES[1:]}
        backend.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _noted(kind: type, name: str, journal: Journal) -> Any:
    inner = getattr(kind, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        before = journal.enter_collective(name)
        result = inner(self, *args, **options)
        # Not when it raises: that is where the rank was.
        journal.enter(before)
        return result

    call.__name__, call.__doc__ = name, inner.__doc__
    return call
