"""Restart the ranks after a failure, with fewer or more of them (contract C10).

::

    until a round ends well:
        rendezvous              # on this host alone, or with the available hosts
        start this host's ranks # the global batch stays the same for any number of ranks
        a rank failed?          # restart, at most max_restarts times
        another host joined?    # every rank saves at the same step and ends; restart

Every round resumes from the newest good checkpoint. Torch's elastic rendezvous tracks the hosts
(`distributed.resilience.elastic_hosts`); the supervisor starts, monitors and ends the ranks.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from distributed.checkpoint.run_directory import newest_checkpoint
from distributed.communication.rendezvous import Rendezvous
from distributed.errors import Preempted, WorkerError, stopped_by
from distributed.interfaces.launcher import RankCommand, Supervisor
from distributed.interfaces.plan import RunPlan
from distributed.registry.catalog import get_catalog
from distributed.resilience.preemption import catch_signals
from distributed.system.output import print_line

Supervise = Callable[["RunPlan", str, int], "Supervisor"]
"""``(plan, host, port) -> Supervisor`` of this host's ranks, whose rendezvous is at that address."""

_RESTARTS = "restarts.json"


@dataclass(frozen=True)
class HostSlot:
    """This host's slot in a round.

    Attributes:
        node_rank: index among the hosts.
        num_nodes: number of hosts with ranks in the round; hosts with a higher index are on standby.
        local_size: number of ranks that a host starts.
    """

    node_rank: int
    num_nodes: int
    local_size: int


class Membership(ABC):
    """The hosts of a round. Unless overridden, no other host joins or leaves.

    Attributes:
        has_others: whether other hosts may join and leave.
    """

    has_others = False

    @abstractmethod
    def meet(self) -> HostSlot:
        """Wait for the hosts of the next round."""

    @abstractmethod
    def store(self, size: int) -> AbstractContextManager[tuple[str, int]]:
        """Host and port of the rendezvous store of the round's `size` ranks."""

    def watch(self, newcomer: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `newcomer` when another host wants to join."""
        return nullcontext()

    def stand_by(self) -> None:
        """Return when the round has ended, in which this host has no ranks.

        Raises:
            SystemExit: the run has ended.
        """
        raise AssertionError("a single host is in every round")

    def note_failure(self, error: WorkerError, checkpoint: str | None) -> None:
        """Record that a round failed; `checkpoint` is the newest good one."""
        return

    def finish(self) -> None:
        """End the run: return when the other hosts no longer need this one."""
        return


class SingleHost(Membership):
    """One host. The number of its ranks stays the same unless one rank keeps failing.

    Args:
        counts: numbers of ranks that keep the global batch, largest first.
    """

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self._last: tuple[int, str | None] | None = None

    def meet(self) -> HostSlot:
        return HostSlot(0, 1, self.counts[0])

    def store(self, size: int) -> AbstractContextManager[tuple[str, int]]:
        return served("127.0.0.1", size)

    def note_failure(self, error: WorkerError, checkpoint: str | None) -> None:
        """Continue with fewer ranks if one fails twice without a step saved in between: it may have
        lost its device."""
        if self._last == (error.rank, checkpoint) and len(self.counts) > 1:
            del self.counts[0]
            self._last = None
        else:
            self._last = (error.rank, checkpoint)


class Elastic:
    """The rounds of one run on this host.

    Args:
        plan: plan for the largest number of ranks.
        supervise: function that makes a round's supervisor.
        rescale: function ``(plan, num_nodes, local_size, node_rank) -> plan`` of a round.
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
        self._signal: str | None = None
        self._ended_well = False

    def run(self) -> None:
        """Run rounds until one succeeds or no restarts are left.

        Raises:
            WorkerError, UserError: as `Launcher.run`.
            Preempted, KeyboardInterrupt: a signal while this host had no ranks, between two rounds.
        """
        try:
            with catch_signals(self._on_signal) if self.plan.config.heeds_signals else nullcontext():
                self._rounds()
        except (Preempted, KeyboardInterrupt) as stopped:
            print_line(str(stopped), sys.stdout)  # not in the handler: a signal may interrupt a print
            raise

    def _on_signal(self, name: str) -> None:
        self._signal = name
        self._raise_if_preempted()

    def _raise_if_preempted(self) -> None:
        # After all ranks have finished nothing is left to save, and other hosts may still need this one.
        if self._signal is not None and not self._ended_well:
            raise self._preempted(self._signal)

    def _preempted(self, name: str) -> Preempted | KeyboardInterrupt:
        from distributed.checkpoint.reader import read_manifest

        place = newest_checkpoint(self.plan)
        return stopped_by(name, int(read_manifest(place)["step"]) if place else 0, place or "")

    def _rounds(self) -> None:
        size = 0
        while True:
            forget_round(self.command.folder)
            write_restarts(self.command.folder, self.restarts)
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
                self._count_failure(error)
                continue
            if supervisor.received_signal:
                return  # this host is preempted; the others continue without it
            if not self._ended_for_newcomer():
                self.members.finish()
                return
            self._ended_well = False
            self._raise_if_preempted()
            self.restarts.append("membership changed: a host joined or left")

    def _round(self, plan: RunPlan) -> Supervisor:
        with self.members.store(plan.world_size) as (host, port):
            supervisor = self.supervise(plan, host, port)
            with self.members.watch(supervisor.request_stop):
                try:
                    supervisor.run()
                except WorkerError as error:
                    # Before leaving the rendezvous, which may take long if the network is down.
                    if self._failures < plan.config.max_restarts:
                        print_line(error.summary, sys.stdout)
                    self._signal = supervisor.received_signal
                    raise
                self._ended_well = True
        return supervisor

    def _count_failure(self, error: WorkerError) -> None:
        """Count a failure; raises it if no restarts are left, or if this host is preempted."""
        self._failures += 1
        allowed = self.plan.config.max_restarts
        if self._signal is not None and error.exc_type == "HostLost":
            raise self._preempted(self._signal) from error  # this host's ranks have saved, if they could
        if self._failures > allowed or self._signal is not None:
            raise error
        checkpoint = newest_checkpoint(self.plan)
        self.members.note_failure(error, checkpoint)
        self.restarts.append(error.summary)
        get_catalog().manager.hook.on_restart(plan=self.plan, error=error)
        print_line(f"restart {self._failures} of {allowed}", sys.stdout)

    def _announce(self, before: int, plan: RunPlan) -> None:
        changed = f" instead of {before}" if plan.world_size != before else ""
        place = newest_checkpoint(self.plan) or "the beginning"
        print_line(f"continuing with {plan.world_size} ranks{changed} from {place}; {plan.batch}", sys.stdout)

    def _ended_for_newcomer(self) -> bool:
        """Whether the ranks saved and ended because another host joined."""
        if not self.members.has_others:
            return False
        result = json.loads((self.command.folder / "result.json").read_text(encoding="utf-8"))
        return bool(result["history"]["preempted"])


def forget_round(folder: Path) -> None:
    """Remove the files of an earlier round from the run's private folder. Otherwise its journals would be
    read as those of the new ranks."""
    for pattern in ("error_*.json", "result.json", "journal_*", "stacks_*", "verdict.json"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_restarts(folder: Path, reasons: list[str]) -> None:
    """Write the reasons of all restarts of the run in `folder`, for `read_restarts`."""
    (folder / _RESTARTS).write_text(json.dumps(reasons), encoding="utf-8")


def read_restarts(folder: Path) -> list[str]:
    """The reason of each restart of the run in `folder`."""
    path = folder / _RESTARTS
    found: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


@contextmanager
def served(host: str, size: int) -> Iterator[tuple[str, int]]:
    """Serve a store for `size` ranks; yields host and port."""
    with Rendezvous(host, 0, size) as rendezvous:
        yield rendezvous.host, rendezvous.port
