"""``python -m distributed.torchrun``: torchrun for schedulers that preempt and requeue jobs.

It takes torchrun's arguments, but passes SIGTERM and SIGUSR1 on to the ranks. They save and exit with 75;
then this process exits with 75 and does not restart them. (torchrun always exits with 1, dies of SIGUSR1,
and treats a preempted rank as failed.) Ranks that SIGTERM kills before they catch signals have nothing to
save and count as preempted. A user's mistake (exit code 2) causes no restart either.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from distributed.errors import EXIT_MISTAKE, EXIT_PREEMPTED
from distributed.resilience.preemption import SIGNALS

__all__ = ["main"]

_FINAL_CODES = (EXIT_PREEMPTED, EXIT_MISTAKE)
"""Exit codes of a rank that a restart would not change."""

_agents: list[Agent] = []


class _Preempted(SignalException):
    """This host is preempted and has no ranks left. As a SignalException, because torch then leaves the
    rendezvous open for other hosts."""


class Agent(LocalElasticAgent):
    """torch's agent of one host, without restarts of preempted ranks.

    Attributes:
        preempted: whether a signal was passed on.
    """

    preempted = False
    _late: list[int] | None = None
    """Signals received while ranks are being started; None at other times."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _agents[:] = [self]

    def pass_on(self, number: int) -> bool:
        """Pass a signal on to the ranks; False when there are none, as between a failure and a restart."""
        if self._late is not None:
            self._late.append(number)
            return True
        context, passed = self._pcontext, False
        for pid in context.pids().values() if context is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                passed = True
        if passed:
            self.preempted, self._remaining_restarts = True, 0
        return passed

    def _start_workers(self, worker_group: Any) -> Any:
        if self.preempted:
            raise _Preempted("preempted", signal.SIGTERM)
        # torch has the new ranks' pids only when all are started.
        self._late = []
        # A rank needs seconds until it catches signals; SIGUSR1 is deferred until then. SIGTERM is not,
        # because torch uses it to end the others when a rank fails.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            late, self._late = self._late, None
            for number in late:
                self.pass_on(number)

    def _restart_workers(self, worker_group: Any) -> None:
        # Not for hosts that want to join, because these ranks are saving.
        if not self.preempted:
            super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode in _FINAL_CODES for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


def main(argv: list[str] | None = None) -> int:
    """Start the ranks of this host as ``torchrun`` would.

    Args:
        argv: torchrun's arguments; None for this process's.

    Returns:
        0; 75 when the ranks were preempted and saved, or had not begun; 2 when the first failure was a
        user's mistake.

    Raises:
        ChildFailedError: a rank failed; exit code 1, as torchrun's.
        SystemExit: wrong arguments; exit code 2.
    """
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    if not any(word.replace("_", "-").startswith("--signals-to-handle") for word in words):
        args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # SIGTERM and SIGUSR1 are passed on here
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        run(args)
    except _Preempted:
        return EXIT_PREEMPTED
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        if -code in SIGNALS and _agents[0].preempted:
            return EXIT_PREEMPTED
        if code not in _FINAL_CODES:
            raise
        return code
    return 0


def _pass_on(number: int, frame: Any) -> None:
    if not _agents or not _agents[0].pass_on(number):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())
