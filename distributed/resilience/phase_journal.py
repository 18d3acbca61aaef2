"""Journal of a rank's current phase, readable by other processes: one small mapped file per rank.

Entering a phase packs about fifty bytes into shared memory, without a system call. With it the launcher
reports what a hung or killed rank was doing, and since when.
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

_PLACES = {
    "data": "phase 'data' (loading samples)",
    "forward": "forward",
    "backward": "backward",
    "callback": "a callback",
    "validation": "validation",
}
"""How a message names a phase; any other one is quoted."""

_NUMBER = {name: index for index, name in enumerate(JOURNAL_PHASES)}
_KIND = {name: index for index, name in enumerate(COLLECTIVES)}
_RECORD = struct.Struct("=qqqqdBBBB")  # marks, step, epoch, collectives, since, phase, outer, kind, status
_OWNER = struct.Struct("=qQ")  # pid, thread
_DETAIL = struct.Struct("=B158s")  # length and text
_SIZE, _OWNER_AT, _DETAIL_AT = 256, 64, 96


@dataclass(frozen=True)
class Entry:
    """One rank's journal, as read.

    Attributes:
        phase: one of `JOURNAL_PHASES`.
        outer: phase from which a collective was called; otherwise `phase`.
        collective: name of the backend's collective that the rank is in; otherwise empty.
        step: number of the current step, from 1; 0 before the first.
        marks: number of phases entered so far; it grows while the rank makes progress.
        collectives: number of the backend's collectives entered so far.
        since: time when the phase was entered, by this host's monotonic clock, in seconds.
        status: `RUNNING`, `ENDED` or `FAILED`.
        thread: id of the training loop's thread.
        detail: what the rank does within the phase, in words; empty where it has not recorded that.
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
    detail: str = ""

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """Read the journal at `path`; None if there is none, or it is empty."""
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
        length, text = _DETAIL.unpack_from(data, _DETAIL_AT)
        detail = text[:length].decode("utf-8", "replace")
        return cls(*names, step, epoch, marks, collectives, since, status, pid, thread, detail)

    def place(self) -> str:
        """Phase and step as text: ``forward of step 13 (epoch 0)``."""
        if self.phase == "communication":
            return (
                f"{self.collective} (collective number {self.collectives} of this rank), called in"
                f" {self.outer_place()}"
            )
        return self._describe_phase(self.phase)

    def outer_place(self) -> str:
        """`place` without the collective: phase and step from which it was called."""
        return self._describe_phase(self.outer)

    def _describe_phase(self, phase: str) -> str:
        name = _PLACES.get(phase, f"phase '{phase}'")
        if self.step == 0:
            return f"{name}, before the first step"
        word = "after" if phase in _AFTER else "of"
        detail = f", {self.detail}" if self.detail else ""
        return f"{name} {word} step {self.step} (epoch {self.epoch}){detail}"


class Journal:
    """The journal of this rank. Not thread-safe: the training loop's thread owns it.

    Args:
        folder: private folder of the file ``journal_<rank>``.
    """

    __slots__ = (
        *("_detailed", "_memory", "_status", "collectives", "epoch", "folder"),
        *("marks", "phase", "rank", "step"),
    )

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        # An empty record would read as no progress since the host started. In half a later one, each value
        # is that of one of the two records.
        with draft_of(self.path(folder, rank)) as draft:
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                # Without space for a hole in a mapped file, the first write would end the process.
                os.posix_fallocate(descriptor, 0, _SIZE)
                self._memory = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
            self.marks, self.phase, self._detailed = 0, "idle", False
            self._reset("idle")

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """The path of that rank's journal."""
        return folder / f"journal_{rank}"

    def begin(self) -> None:
        """Reset the journal for a run that begins in this thread."""
        self._reset("setup")

    def _reset(self, phase: str) -> None:
        self.step = self.epoch = self.collectives = 0
        self._status = RUNNING
        owner = _OWNER.pack(os.getpid(), threading.get_ident())
        self._memory[_OWNER_AT : _OWNER_AT + _OWNER.size] = owner
        self.enter(phase)

    def enter(self, phase: str, step: int | None = None, epoch: int | None = None) -> str:
        """Record that `phase` begins, and the number of the current step; returns the previous phase."""
        if self._status:
            return phase
        before, self.phase = self.phase, phase
        if step is not None:
            self.step = step
        if epoch is not None:
            self.epoch = epoch
        if self._detailed:
            self._memory[_DETAIL_AT] = 0
            self._detailed = False
        self._record(_NUMBER[phase], _NUMBER[phase], 0)
        return before

    def describe(self, detail: str) -> None:
        """Record what the rank does now within the phase, until it enters another: at most 158 bytes."""
        if self._status == RUNNING:
            text = detail.encode()[: _DETAIL.size - 1]
            self._memory[_DETAIL_AT : _DETAIL_AT + _DETAIL.size] = _DETAIL.pack(len(text), text)
            self._detailed = True

    def enter_collective(self, name: str) -> str:
        """Record that the backend's collective `name` is entered; returns the previous phase."""
        if self._status:
            return self.phase
        self.collectives += 1
        self._record(_NUMBER["communication"], _NUMBER[self.phase], _KIND[name])
        return self.phase

    def _record(self, phase: int, outer: int, kind: int) -> None:
        self.marks += 1
        numbers = self.marks, self.step, self.epoch, self.collectives, perf_counter()
        # Not `pack_into`: it writes zeros first, which would read as no progress since the host started.
        self._memory[: _RECORD.size] = _RECORD.pack(*numbers, phase, outer, kind, RUNNING)

    def end(self, status: int) -> None:
        """Freeze the journal at the end of the run: later phases are not recorded."""
        if self._status == RUNNING:
            self._status = status
            struct.pack_into("=B", self._memory, _RECORD.size - 1, status)

    def entry(self) -> Entry | None:
        """The current entry, read back from the file."""
        return Entry.read(self.path(self.folder, self.rank))


_journals: list[Journal] = []


def open_journal(folder: Path, rank: int) -> Journal:
    """This process's journal in `folder`, reset for a run."""
    if not _journals or (_journals[0].folder, _journals[0].rank) != (folder, rank):
        _journals[:] = [Journal(folder, rank)]
    _journals[0].begin()
    return _journals[0]


def current() -> Journal | None:
    """This process's journal; None without one."""
    return _journals[0] if _journals else None


def freeze_journal() -> None:
    """Freeze the journal after a failure, so that cleanup does not overwrite the failing phase."""
    if _journals:
        _journals[0].end(FAILED)


def no_op(phase: str, step: int | None = None, epoch: int | None = None) -> str:
    """Replacement for `Journal.enter` in a process without a journal."""
    return phase


def instrument(backend: Any, journal: Journal) -> None:
    """Record the phases and the collectives of `backend` in `journal`.

    The backend's class is replaced by a subclass, because wrappers on the object would make a copy of
    the backend call the original's methods.
    """
    backend.timers.enter, backend.timers.describe = journal.enter, journal.describe
    if backend.world.size > 1:
        kind = type(backend)
        methods = {name: _instrument_collective(kind, name, journal) for name in COLLECTIVES[1:]}
        backend.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _instrument_collective(kind: type, name: str, journal: Journal) -> Any:
    inner = getattr(kind, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        before = journal.enter_collective(name)
        result = inner(self, *args, **options)
        # Not after an exception: the journal keeps the collective that failed.
        journal.enter(before)
        return result

    call.__name__, call.__doc__ = name, inner.__doc__
    return call
