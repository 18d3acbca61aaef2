"""Starts the ranks again after a failure, and with fewer or more of them (contract C10).

::

    until a round ends well:
        meet                    # alone on this host, or with the hosts that are there
        start this host's ranks # the global batch stays, whatever their number
        a rank failed?          # restart, at most max_restarts times
        another host came?      # every rank saves at the same step and ends; restart

Every round goes on from the newest good checkpoint. Which hosts are there is torch's elastic rendezvous'
to know (`distributed.resilience.elastic_hosts`); starting, watching and ending ranks is the supervisor's,
as always.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distributed.checkpoint.run_directory import newest_checkpoint
from distributed.communication.rendezvous import Rendezvous
from distributed.errors import Preempted, WorkerError
from distributed.registry.catalog import get_catalog
from distributed.resilience.failure_reports import say
from distributed.resilience.preemption import hearing

if TYPE_CHECKING:
    from distributed.interfaces.launcher import RankCommand, Supervisor
    from distributed.interfaces.plan import RunPlan

__all__ = [
    "Alone",
    "Elastic",
    "Membership",
    "Place",
    "forget_round",
    "note_restarts",
    "restarts_of",
    "served",
]

Supervise = Callable[["RunPlan", str, int], "Supervisor"]
"""``(plan, host, port) -> Supervisor`` of this host's ranks, which meet there."""

_RESTARTS = "restarts.json"


@dataclass(frozen=True)
class Place:
    """This host's part in a round.

    Attributes:
        node_rank: its index among the hosts.
        num_nodes: hosts with ranks in the round; those behind stand by.
        local_size: ranks that a host starts.
    """

    node_rank: int
    num_nodes: int
    local_size: int


class Membership(Protocol):
    """Who takes part in a round.

    Attributes:
        has_others: other hosts may come and go.
    """

    has_others: bool

    def meet(self) -> Place:
        """Wait for the hosts of the next round."""

    def store(self, size: int) -> AbstractContextManager[tuple[str, int]]:
        """Host and port of the store in which the round's `size` ranks meet."""

    def watch(self, newcomer: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `newcomer` when another host wants to take part."""

    def stand_by(self) -> None:
        """Return when the round has ended without this host, which has no ranks in it.

        Raises:
            SystemExit: the run has ended.
        """

    def note_failure(self, error: WorkerError, checkpoint: str | None) -> None:
        """A round failed; `checkpoint` is the newest good one."""

    def finish(self) -> None:
        """All is done: return when the other hosts no longer need this one."""


class Alone:
    """One host. Its ranks are as many as before, unless the same one keeps failing.

    Args:
        counts: numbers of ranks that keep the global batch, largest first.
    """

    has_others = False

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self._last: tuple[int, str | None] | None = None

    def meet(self) -> Place:
        return Place(0, 1, self.counts[0])

    def store(self, size: int) -> AbstractContextManager[tuple[str, int]]:
        return served("127.0.0.1", size)

    def watch(self, newcomer: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def stand_by(self) -> None:
        raise AssertionError("a host alone takes part in every round")

    def note_failure(self, error: WorkerError, checkpoint: str | None) -> None:
        """A rank that fails twice without a step saved in between has lost its device, perhaps:
        go on with fewer."""
        if self._last == (error.rank, checkpoint) and len(self.counts) > 1:
            del self.counts[0]
            self._last = None
        else:
            self._last = (error.rank, checkpoint)

    def finish(self) -> None:
        return


class Elastic:
    """The rounds of one run on this host.

    Args:
        plan: for the largest number of ranks.
        command: what every rank runs.
        supervise: makes a round's supervisor.
        members: who takes part.
        rescale: ``(plan, num_nodes, local_size, node_rank) -> plan`` of a round.
    """

    def __init__(
        self,
        plan: RunPlan,
        command: RankCommand,
        supervise: Supervise,
        members: Membership,
        rescale: Callable[[RunPlan, int, int, int], RunPlan],
    ) -> None:
        self.plan, self.command, self.supervise = plan, command, supervise
        self.members, self.rescale = members, rescale
        self.restarts: list[str] = []
        self._failures = 0
        self._told: str | None = None
        self._ended_well = False

    def run(self) -> None:
        """Run rounds until one ends well, or restarts have run out.

        Raises:
            WorkerError, UserError: as `Launcher.run`.
            Preempted: this host was told to go while it had no ranks, between two rounds.
        """
        try:
            with hearing(self._hear) if self.plan.config.heeds_signals else nullcontext():
                self._rounds()
        except Preempted as gone:
            say(str(gone), sys.stdout)  # not by who hears: a signal may come in the middle of a print
            raise

    def _hear(self, name: str) -> None:
        self._told = name
        self._leave_if_told()

    def _leave_if_told(self) -> None:
        # With all ranks at their end nothing is left to save, and other hosts may still need this one.
        if self._told is not None and not self._ended_well:
            raise self._gone(self._told)

    def _gone(self, name: str) -> Preempted:
        from distributed.checkpoint.reader import read_manifest

        place = newest_checkpoint(self.plan)
        return Preempted(name, int(read_manifest(place)["step"]) if place else 0, place or "")

    def _rounds(self) -> None:
        size = 0
        while True:
            forget_round(self.command.folder)
            note_restarts(self.command.folder, self.restarts)
            place = self.members.meet()
            if place.node_rank >= place.num_nodes:
                self.members.stand_by()
                continue
            plan = self.rescale(self.plan, place.num_nodes, place.local_size, place.node_rank)
            if size:
                self._announce(size, plan)
            size = plan.world_size
            try:
                supervisor = self._round(plan)
            except WorkerError as error:
                self._note(error)
                continue
            if supervisor.heard:
                return  # this host is to go; the others go on without it
            if not self._made_room():
                self.members.finish()
                return
            self._ended_well = False
            self._leave_if_told()
            self.restarts.append("another host came or went")

    def _round(self, plan: RunPlan) -> Supervisor:
        with self.members.store(plan.world_size) as (host, port):
            supervisor = self.supervise(plan, host, port)
            with self.members.watch(supervisor.ask_to_go):
                try:
                    supervisor.run()
                except WorkerError as error:
                    # Leaving the others may take long when it is the network that is gone.
                    if self._failures < plan.config.max_restarts:
                        say(error.summary, sys.stdout)
                    self._told = supervisor.heard
                    raise
                self._ended_well = True
        return supervisor

    def _note(self, error: WorkerError) -> None:
        """Count a failure; raises it when it was one too many, or when this host is to go."""
        self._failures += 1
        allowed = self.plan.config.max_restarts
        if self._told is not None and error.exc_type == "HostLost":
            raise self._gone(self._told) from error  # what is here was saved, as far as it could be
        if self._failures > allowed or self._told is not None:
            raise error
        checkpoint = newest_checkpoint(self.plan)
        self.members.note_failure(error, checkpoint)
        self.restarts.append(error.summary)
        get_catalog().manager.hook.on_restart(plan=self.plan, error=error)
        say(f"restart {self._failures} of {allowed}", sys.stdout)

    def _announce(self, before: int, plan: RunPlan) -> None:
        changed = f" instead of {before}" if plan.world_size != before else ""
        place = newest_checkpoint(self.plan) or "the beginning"
        say(f"going on with {plan.world_size} ranks{changed} from {place}; {plan.batch}", sys.stdout)

    def _made_room(self) -> bool:
        """Whether the ranks saved and ended for another host's sake, and not for good."""
        if not self.members.has_others:
            return False
        result = json.loads((self.command.folder / "result.json").read_text(encoding="utf-8"))
        return bool(result["history"]["preempted"])


def forget_round(folder: Path) -> None:
    """Remove what the ranks of an earlier round left in the run's private folder: new ones would be
    judged by the journals of those before them until they have their own."""
    for pattern in ("error_*.json", "result.json", "journal_*", "stacks_*", "verdict.json"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def note_restarts(folder: Path, reasons: list[str]) -> None:
    """Leave for `restarts_of` why the run in `folder` was started again."""
    (folder / _RESTARTS).write_text(json.dumps(reasons), encoding="utf-8")


def restarts_of(folder: Path) -> list[str]:
    """Why the run in `folder` was started again, once each time."""
    path = folder / _RESTARTS
    found: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


@contextmanager
def served(host: str, size: int) -> Iterator[tuple[str, int]]:
    """A store of this process for `size` ranks: its host and port."""
    with Rendezvous(host, 0, size) as rendezvous:
        yield rendezvous.host, rendezvous.port
