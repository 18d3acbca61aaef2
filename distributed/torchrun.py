"""``python -m distributed.torchrun``: torchrun, for schedulers that take machines away and requeue jobs.

The same arguments. What differs: SIGTERM and SIGUSR1 are passed on to the ranks, which save and exit with
75; then this exits with 75, too, and starts nobody again, where torchrun exits with 1 whatever its ranks
exited with, dies of SIGUSR1, and takes a rank that was told to go for one that failed. A user's mistake
(2) is not tried again either.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from distributed.errors import EXIT_MISTAKE, EXIT_PREEMPTED
from distributed.preemption import SIGNALS

__all__ = ["main"]

_MEANT = (EXIT_PREEMPTED, EXIT_MISTAKE)
"""Exit codes of a rank that say something, and that starting again would not change."""

_agents: list[Agent] = []


class Agent(LocalElasticAgent):
    """torch's agent of one host; a rank that was told to go is not started again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _agents[:] = [self]

    def tell(self, number: int) -> bool:
        """Pass a signal on to the ranks; False when there are none, as between a failure and a restart."""
        context, told = self._pcontext, False
        for pid in context.pids().values() if context is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                told = True
        return told

    def _start_workers(self, worker_group: Any) -> Any:
        # A rank needs seconds until it can hear; until then the signal waits for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

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
        0; 75 when the ranks saved because they were told to go; 2 when the first that failed did so on
        a user's mistake.

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
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
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
