"""ThreadLauncher: ranks as threads of this process, for tests and for meshes on one GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

from distributed.communication.rank_turns import RankTurns
from distributed.communication.task_file import load_task
from distributed.communication.thread_group import Exchange, join_threads, worlds_of_threads
from distributed.interfaces.backend import Backend
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import RunPlan
from distributed.launch.rank_process import RankPayload, run_here
from distributed.launch.thread_state import RankState
from distributed.resilience.failure_reports import FailureReport, find_cause

__all__ = ["ThreadLauncher"]


class ThreadLauncher(Launcher):
    """Runs ranks as threads that take turns. Each has its own copy of the task, its own process groups,
    random numbers and settings of torch; the rest of the process is shared.

    A rank ends by returning or raising; nothing of it outlives the run, but one that did not come back within
    `collective_timeout` between two collectives.

    Attributes:
        counts: (name, type of device) -> calls of collectives and messages in all runs so far, of all ranks.
    """

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        turns = RankTurns(plan.world_size, RankState(), plan.config.collective_timeout)
        exchange = Exchange(turns)
        with worlds_of_threads(), warnings.catch_warnings():
            # Groups of threads have no timeouts of their own: a wait that cannot end is an error at once.
            warnings.filterwarnings("ignore", message="Set timeout is now only supported")
            failures = turns.run(partial(_run_rank, exchange, plan.world_size, command))
        self.counts += exchange.counts
        reports = [FailureReport.from_error(failure.error, failure.rank) for failure in failures]
        if reports:
            raise find_cause(reports).to_error([report.rank for report in reports])


def _run_rank(exchange: Exchange, size: int, command: RankCommand, rank: int) -> None:
    job: RankPayload = load_task(command.folder / "task.bin")
    place = LauncherEnvironment("threads", rank, size, rank, size, 0, 1, "127.0.0.1", 0)
    job.plan = replace(job.plan, joined=place)
    with join_threads(exchange, rank):
        run_here(job, command.folder, _Unobserved)


class _Unobserved:
    """In the place of `distributed.resilience.monitor_process.MonitoredRank`, which observes processes."""

    def __init__(self, plan: RunPlan) -> None:
        """Nothing to prepare."""

    def joined(self, backend: Backend) -> None:
        """Nothing to begin."""

    def find_report(self) -> FailureReport | None:
        """None: the launcher sees every failure."""
        return None

    def tell(self, error: BaseException) -> None:
        """Nothing: the launcher raises it with the number of its rank."""

    def end(self, status: int = 0) -> None:
        """Nothing to end."""
