"""``python -m distributed.torchrun``: torchrun, for schedulers that take machines away and requeue jobs.

The same arguments. What differs: SIGTERM and SIGUSR1 are passed on to the ranks, which save and exit with
75; then this exits with 75, too, and starts nobody again, where torchrun exits with 1 whatever its ranks
exited with, dies of SIGUSR1, and takes a rank that was told to go for one that failed. Ranks that SIGTERM
ends before they listen have nothing to save, and count as told to go. A user's mistake (2) is not tried
again either.
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

_MEANT = (EXIT_PREEMPTED, EXIT_MISTAKE)
"""Exit codes of a rank that say something, and that starting again would not change."""

_agents: list[Agent] = []


class _Gone(SignalException):
    """We were told to go, and there are no ranks left to tell. torch leaves the meeting open for other
    hosts when its agent ends by a signal."""


class Agent(LocalElasticAgent):
    """torch's agent of one host; a rank that was told to go is not started again.

    Attributes:
        told: whether a signal was passed on.
    """

    told = False
    _late: list[int] | None = None
    """Signals heard while ranks are being started; None at other times."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _agents[:] = [self]

    def tell(self, number: int) -> bool:
        """Pass a signal on to the ranks; False when there are none, as between a failure and a restart."""
        if self._late is not None:
            self._late.append(number)
            return True
        context, told = self._pcontext, False
        for pid in context.pids().values() if context is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                told = True
        if told:
            self.told, self._remaining_restarts = True, 0
        return told

    def _start_workers(self, worker_group: Any) -> Any:
        if self.told:
            raise _Gone("told to go", signal.SIGTERM)
        # torch knows the new ranks' pids only when all are there.
        self._late = []
        # A rank needs seconds until it can hear; until then the signal waits for it. SIGTERM may not wait:
        # with it torch ends the others when a rank fails.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            late, self._late = self._late, None
            for number in late:
                self.tell(number)

    def _restart_workers(self, worker_group: Any) -> None:
        # Hosts that want to join would have it; but these ranks are saving.
        if not self.told:
            super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode in _MEANT for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


def main(argv: list[str] | None = None) -> int:
    """Start the ranks of this host as ``torchrun`` would.

    Args:
        argv: torchrun's arguments; None for this process's.

    Returns:
        0; 75 when the ranks were told to go and saved, or had not begun; 2 when the first that failed did
        so on a user's mistake.

    Raises:
        ChildFailedError: a rank failed; exit code 1, as torchrun's.
        SystemExit: wrong arguments; exit code 2.
    """
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    if not any(word.replace("_", "-").startswith("--signals-to-handle") for word in words):
        args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # of the others we take care
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        run(args)
    except _Gone:
        return EXIT_PREEMPTED
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        if -code in SIGNALS and _agents[0].told:
            return EXIT_PREEMPTED
        if code not in _MEANT:
            raise
        return code
    return 0


def _pass_on(number: int, frame: Any) -> None:
    if not _agents or not _agents[0].tell(number):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())
