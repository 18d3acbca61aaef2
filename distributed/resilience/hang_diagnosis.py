"""Diagnose a hang: which rank is blocking the others, from the ranks' journals and stacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from distributed.errors import listed
from distributed.resilience.phase_journal import JOURNAL_PHASES, Entry
from distributed.resilience.stack_dumps import Frame

_OUR_COLLECTIVES = (
    "distributed.communication.process_group",
    "distributed.communication.rendezvous",
    "distributed.training.low_communication.channels",
    "distributed.training.low_communication.parameter_server",
    "distributed.training.process_group_backend",
)
_EITHER = ("torch.autograd", "tensorflow.python")
_ORDER = {name: index for index, name in enumerate(JOURNAL_PHASES)}
_AFTER_DATA = ("epoch end", "validation", "finish")


@dataclass(frozen=True)
class LoaderWorker:
    """A DataLoader worker: pid, the kernel's letter for its state, and its stack if available."""

    pid: int
    state: str
    stack: Sequence[Frame] = ()


@dataclass(frozen=True)
class RankSnapshot:
    """State of one rank, observed from outside its process.

    Attributes:
        entry: its journal; None when it keeps none.
        age: seconds since the last journal entry.
        state: the kernel's letter for its process; empty when it is gone.
        busy: it used a core since the last look.
        stack: of its training loop, the most recent call first; empty when not asked for.
        workers: loader workers of a rank that waits for them.
        waited: it is known to have waited for another rank.
        blocking_modules: modules whose frames mean that it waits in communication (`BackendSpec`).
    """

    rank: int
    host: str
    pid: int
    entry: Entry | None
    age: float = 0.0
    state: str = "S"
    busy: bool = False
    stack: Sequence[Frame] = ()
    workers: Sequence[LoaderWorker] = ()
    waited: bool = False
    blocking_modules: Sequence[str] = ()

    @property
    def place(self) -> str:
        """Phase and step of the rank, as text."""
        return self.entry.place() if self.entry else "start-up, before the first journal entry"

    @property
    def position(self) -> tuple[int, int, int, int]:
        """Progress of the rank; ranks that wait for each other in step have equal positions."""
        if self.entry is None:
            return (0, 0, 0, 0)
        return (self.entry.epoch, self.entry.step, _ORDER[self.entry.outer], self.entry.collectives)

    @property
    def does(self) -> Literal["waits", "either", "works"]:
        """Whether the rank waits in a collective. Backward is ``either``, because DDP waits inside it."""
        file = self.stack[0].file if self.stack else ""
        if self.waited:
            return "waits"
        if self.state == "T":
            return "works"
        if file in _our_files() or _lies_in(file, self.blocking_modules):
            return "waits"
        if _lies_in(file, _EITHER):
            return "either"
        phase = self.entry.phase if self.entry else ""
        if not file and phase in ("communication", "backward"):
            return "waits" if phase == "communication" else "either"
        return "works"


@cache
def _our_files() -> frozenset[str]:
    """Files of our modules that wait in communication, found without importing them."""
    specs = [find_spec(name) for name in _OUR_COLLECTIVES]
    return frozenset(spec.origin for spec in specs if spec is not None and spec.origin is not None)


def _lies_in(file: str, modules: Iterable[str]) -> bool:
    """Whether `file` belongs to one of `modules`, or to a module in one that is a package."""
    for name in modules:
        root, found, rest = file.partition(f"/{name.replace('.', '/')}")
        # A package of that name inside another one, as our backend `horovod`, is not the library.
        if found and rest.startswith(("/", ".py")) and not Path(root, "__init__.py").exists():
            return True
    return False


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that cause a hang.

    Attributes:
        culprits: ranks, the main one first; empty when no rank differs from the others.
        kind: ``late``: the others wait for the culprit; ``apart``: all wait, in different collectives;
            ``alone``: no progress, but no other rank waits; ``together``: all wait in one place.
        story: clause that follows the culprit's name in a message.
        waiting: ranks that wait for the culprit.
    """

    culprits: Sequence[int]
    kind: Literal["late", "apart", "alone", "together"]
    story: str
    waiting: Sequence[int] = field(default=())


def diagnose(ranks: Sequence[RankSnapshot]) -> Diagnosis:
    """Diagnose the ranks of one run, at least one.

    A rank outside of collectives is late if another waits in one. If all wait in different places, the
    ranks are apart, and the minority is named. Of two places, the later one is named, because its ranks
    skipped the collective in which the others wait.
    """
    working = [snapshot for snapshot in ranks if snapshot.does == "works"]
    waiting = [snapshot.rank for snapshot in ranks if snapshot.does != "works"]
    if working:
        # Of several, the one with the least progress.
        first = min(working, key=lambda snapshot: (snapshot.position, -snapshot.age))
        behind = [snapshot.rank for snapshot in working if snapshot.position == first.position]
        behind.sort(key=lambda rank: rank != first.rank)
        return Diagnosis(behind if waiting else [first.rank], "late" if waiting else "alone", "", waiting)
    return _diagnose_waiting(ranks)


def _diagnose_waiting(ranks: Sequence[RankSnapshot]) -> Diagnosis:
    groups: dict[tuple[int, int, int], list[RankSnapshot]] = {}
    for snapshot in ranks:
        # Within one phase the numbers of collectives differ if callbacks call some.
        groups.setdefault(snapshot.position[:3], []).append(snapshot)
    if len(groups) == 1:
        return Diagnosis([], "together", "", [snapshot.rank for snapshot in ranks])
    far = sorted(groups, key=lambda position: (len(groups[position]), tuple(-n for n in position)))
    odd, others = groups[far[0]], groups[far[-1]]
    if len(odd) == len(others) and _ended(others[0], odd[0]):
        odd, others = others, odd
    story = _describe_split(odd[0], others[0])
    names = [snapshot.rank for snapshot in odd]
    return Diagnosis(
        names, "apart", story, [snapshot.rank for snapshot in ranks if snapshot.rank not in names]
    )


def _describe_split(odd: RankSnapshot, other: RankSnapshot) -> str:
    """How `odd` came to be elsewhere than `other`: a clause of a message."""
    if odd.entry is None or other.entry is None:
        return ""
    if _ended_before(odd.entry, other.entry):
        return (
            f"ran out of batches in epoch {other.entry.epoch} after step {other.entry.step - 1},"
            f" while the others continued to step {other.entry.step}"
        )
    if _ended_before(other.entry, odd.entry):
        return (
            f"continued to step {odd.entry.step} of epoch {odd.entry.epoch}, while the others ran out"
            f" of batches after step {odd.entry.step - 1}"
        )
    if odd.position > other.position:
        return f"skipped the collective that the other ranks called in {other.entry.outer_place()}"
    return "entered a collective that the others did not enter"


def _ended(ended: RankSnapshot, going: RankSnapshot) -> bool:
    return bool(ended.entry and going.entry and _ended_before(ended.entry, going.entry))


def _ended_before(ended: Entry, going: Entry) -> bool:
    """Whether one rank had finished an epoch in whose next step the other is."""
    within = going.outer in ("data", "forward", "backward", "optimizer")
    same = ended.epoch == going.epoch and ended.outer in _AFTER_DATA and ended.step < going.step
    return within and (same or (ended.epoch > going.epoch and ended.step <= going.step))


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``; of many, the first, and how many more there are."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks))}"
