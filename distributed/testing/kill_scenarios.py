"""Scenarios of `kills`, each drawn by a seed: a kill, a stop, a signal, a suspension, a second run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from distributed.testing.kill_runs import CASES, Kill, Reference, Scenario

__all__ = ["SCENARIOS", "SHARES", "Key", "Plan", "a_kill", "planned", "turns"]

SHARES = {"pytorch-ddp": 10, "fsdp": 3, "deepspeed-2": 2, "horovod": 2, "tensorflow": 1, "ray": 1}
"""Relative number of runs by backend."""

STOPS = (("epoch", 8), ("step", 6))
"""Event and step at which a callback ends a run: the second of three epochs, and within it."""

_PER_EPOCH = 4
_LAST_STEP = ("step end", "step optimizer_step: begin", "step optimizer_step: end")
"""Points that a rank passes once a step."""

Key = tuple[str, int]
"""Backend and number of ranks."""


@dataclass(frozen=True)
class Plan:
    """A run before its moment is drawn.

    Attributes:
        label: what its line in the output begins with.
        choose: the scenario, given what an uninterrupted run has passed.
        stop: see `Scenario`.
    """

    label: str
    key: Key
    choose: Callable[[Reference], Scenario]
    stop: tuple[str, int] | None = None

    @property
    def same(self) -> tuple[Key, tuple[str, int] | None]:
        """What runs have in common that are compared with the same uninterrupted one."""
        return self.key, self.stop

    @property
    def uninterrupted(self) -> Scenario:
        """The run to compare with."""
        return Scenario(CASES[self.key[0]], self.key[1], stop=self.stop)


def turns(backends: Iterable[str], ranks: Sequence[int], number: int) -> Iterator[Key]:
    """(backend, ranks) of each scenario: by shares, evenly mixed, ranks in turn."""
    shares = {name: SHARES.get(name, 1) for name in backends}
    had: Counter[str] = Counter()
    for _ in range(number):
        # The key furthest behind its share.
        name = min(shares, key=lambda name: (had[name] + 1) / shares[name])
        yield name, ranks[had[name] % len(ranks)]
        had[name] += 1


def a_kill(draw: random.Random, reference: Reference, fits: Callable[[str], bool]) -> Kill:
    """A rank, a point that it passes, and one of the times that it does."""
    ranks = [rank for rank, census in reference.census.items() if any(map(fits, census))]
    rank = draw.choice(ranks)
    census = reference.census[rank]
    point = draw.choice([point for point in census if fits(point)])
    return Kill(rank, point, draw.randint(1, census[point]))


def planned(
    seed: int, number: int, names: Sequence[str], backends: Sequence[str] | None, ranks: Sequence[int]
) -> list[Plan]:
    """The runs with the seeds from `seed` on, of the scenarios in turn. A run depends on its own seed alone.

    Args:
        names: of `SCENARIOS`.
        backends: of `CASES`; None for those of `SHARES`. Where Ray starts the ranks, none is signalled.
    """
    return [_plan(number, names, backends or list(SHARES), ranks) for number in range(seed, seed + number)]


def _plan(seed: int, names: Sequence[str], backends: Sequence[str], ranks: Sequence[int]) -> Plan:
    turn, name = seed // len(names), names[seed % len(names)]
    fitting = [backend for backend in backends if backend != "ray" or name in ("kill", "stop")]
    key = next(islice(turns(fitting or backends, ranks, turn + 1), turn, None))
    stop = STOPS[turn % len(STOPS)] if name == "stop" else None
    choose = partial(_choose, seed, turn, name, key, stop)
    return Plan(f"seed {seed}: {name}:", key, choose, stop)


def _choose(
    seed: int, turn: int, name: str, key: Key, stop: tuple[str, int] | None, reference: Reference
) -> Scenario:
    draw = random.Random(seed)
    kill = SCENARIOS[name](draw, turn, reference)
    return Scenario(CASES[key[0]], key[1], (kill,), draw.random() < 0.75, name=name, stop=stop)


def _killed(draw: random.Random, turn: int, reference: Reference) -> Kill:
    kind = ("step", "save", "evaluate", "epoch", "end")[turn % 5]
    return a_kill(draw, reference, lambda point: point.startswith(kind))


def _stopped(draw: random.Random, turn: int, reference: Reference) -> Kill:
    """Killed after the callback has ended the run and the last save is done, in most runs."""
    kind = ("end", "epoch", "end", "save", "end", "step")[turn % 6]
    return a_kill(draw, reference, lambda point: point.startswith(kind))


def _signalled(draw: random.Random, turn: int, reference: Reference) -> Kill:
    """Preempted at the end of an epoch: in its last step, in validation, in its callbacks, in its save."""
    kind = ("step", "evaluate", "epoch", "save")[turn % 4]
    if kind == "step":
        kill = a_kill(draw, reference, lambda point: point in _LAST_STEP)
        epochs = reference.census[kill.rank][kill.point] // _PER_EPOCH
        kill = Kill(kill.rank, kill.point, _PER_EPOCH * draw.randint(1, epochs))
    else:
        kill = a_kill(draw, reference, lambda point: point.startswith(kind))
    return Kill(kill.rank, kill.point, kill.number, draw.choice(["SIGTERM", "SIGUSR1", "SIGINT"]))


def _suspended(draw: random.Random, turn: int, reference: Reference) -> Kill:
    kind = ("step", "save", "evaluate", "epoch")[turn % 4]
    kill = a_kill(draw, reference, lambda point: point.startswith(kind))
    return Kill(kill.rank, kill.point, kill.number, "SIGSTOP")


SCENARIOS: dict[str, Callable[[random.Random, int, Reference], Kill]] = {
    "kill": _killed,
    "stop": _stopped,
    "signal": _signalled,
    "suspend": _suspended,
    "second": _suspended,
}
"""Name -> ``(draw, turn, reference) -> the moment``."""
