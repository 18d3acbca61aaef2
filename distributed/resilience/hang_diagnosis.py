"""Which rank holds the others up, told from where each of them stands. Nothing here asks a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from distributed.resilience.phase_journal import JOURNAL_PHASES, Entry
from distributed.resilience.stack_dumps import Frame

__all__ = ["Seen", "Verdict", "Worker", "judge", "name_ranks"]

_OUR_COLLECTIVES = (
    "distributed.communication.process_group",
    "distributed.communication.rendezvous",
    "distributed.training.process_group_backend",
)
_EITHER = ("torch.autograd", "tensorflow.python")
_ORDER = {name: index for index, name in enumerate(JOURNAL_PHASES)}
_AFTER_DATA = ("epoch end", "validation", "finish")


@dataclass(frozen=True)
class Worker:
    """A loader worker: its process, the kernel's letter for it, and its stack where it tells."""

    pid: int
    state: str
    stack: Sequence[Frame] = ()


@dataclass(frozen=True)
class Seen:
    """One rank, as seen from outside.

    Attributes:
        rank: its number.
        host: where it runs.
        pid: its process.
        entry: its journal; None when it keeps none.
        age: seconds since it last moved, as far as the journal tells.
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
    workers: Sequence[Worker] = ()
    waited: bool = False
    blocking_modules: Sequence[str] = ()

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return self.entry.place() if self.entry else "its start, before it says anything"

    @property
    def position(self) -> tuple[int, int, int, int]:
        """How far it has come; ranks in step have equal ones whenever they wait for each other."""
        if self.entry is None:
            return (0, 0, 0, 0)
        return (self.entry.epoch, self.entry.step, _ORDER[self.entry.outer], self.entry.collectives)

    @property
    def does(self) -> Literal["waits", "either", "works"]:
        """Whether it waits in a collective. Backward of DDP may be either: it waits inside."""
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
class Verdict:
    """Who is to blame.

    Attributes:
        culprits: ranks, the first the one to look at; empty when none stands out.
        kind: ``late``: the others wait for it; ``apart``: all wait, in different collectives;
            ``alone``: it does not move, and nobody waits for it; ``together``: all wait in one place.
        story: what happened, in a clause that follows the culprit's name.
        waiting: ranks that wait for it.
    """

    culprits: Sequence[int]
    kind: Literal["late", "apart", "alone", "together"]
    story: str
    waiting: Sequence[int] = field(default=())


def judge(ranks: Sequence[Seen]) -> Verdict:
    """The verdict on ranks of one run, at least one.

    A rank that waits in no collective while another does is the late one. When all wait, those in
    another place than most are: the ranks have gone apart. Of two places, the one further on is
    named, for it passed the collective in which the other waits.
    """
    working = [seen for seen in ranks if seen.does == "works"]
    waiting = [seen.rank for seen in ranks if seen.does != "works"]
    if working:
        # Of several, the one that has come least far.
        first = min(working, key=lambda seen: (seen.position, -seen.age))
        behind = [seen.rank for seen in working if seen.position == first.position]
        behind.sort(key=lambda rank: rank != first.rank)
        return Verdict(behind if waiting else [first.rank], "late" if waiting else "alone", "", waiting)
    return _among_waiting(ranks)


def _among_waiting(ranks: Sequence[Seen]) -> Verdict:
    groups: dict[tuple[int, int, int], list[Seen]] = {}
    for seen in ranks:
        # Within one phase the numbers of collectives differ where callbacks ask for some.
        groups.setdefault(seen.position[:3], []).append(seen)
    if len(groups) == 1:
        return Verdict([], "together", "", [seen.rank for seen in ranks])
    far = sorted(groups, key=lambda position: (len(groups[position]), tuple(-n for n in position)))
    odd, others = groups[far[0]], groups[far[-1]]
    if len(odd) == len(others) and _ended(others[0], odd[0]):
        odd, others = others, odd
    story = _parted(odd[0], others[0])
    names = [seen.rank for seen in odd]
    return Verdict(names, "apart", story, [seen.rank for seen in ranks if seen.rank not in names])


def _parted(odd: Seen, other: Seen) -> str:
    """How `odd` left the ranks that stand where `other` does."""
    if odd.entry is None or other.entry is None:
        return ""
    if _ended_before(odd.entry, other.entry):
        return (
            f"had no more batches in epoch {other.entry.epoch} after step {other.entry.step - 1},"
            f" while the others went on to step {other.entry.step}"
        )
    if _ended_before(other.entry, odd.entry):
        return (
            f"went on to step {odd.entry.step} of epoch {odd.entry.epoch}, while the others had no more"
            f" batches after step {odd.entry.step - 1}"
        )
    if odd.position > other.position:
        return f"went on without the collective in which the others wait ({other.place})"
    return "is in a collective that the others did not enter"


def _ended(ended: Seen, going: Seen) -> bool:
    return bool(ended.entry and going.entry and _ended_before(ended.entry, going.entry))


def _ended_before(ended: Entry, going: Entry) -> bool:
    """Whether one rank had done with an epoch in whose next step the other is."""
    within = going.outer in ("data", "forward", "backward", "optimizer")
    same = ended.epoch == going.epoch and ended.outer in _AFTER_DATA and ended.step < going.step
    return within and (same or (ended.epoch > going.epoch and ended.step <= going.step))


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
