"""Hears that this process is to go: SIGTERM and SIGUSR1, as schedulers send them.

Hearing is all that a signal handler does here. The training loop asks `asked`, agrees with the other
ranks on a step, saves there and ends the run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["SIGNALS", "ask", "asked", "hearing", "held_back", "listen"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What Slurm, Kubernetes and cloud machines send before they take a machine away."""

INSIST = 2.0
"""Seconds after which the same signal once more means: at once. Schedulers send it to a process and to
its parent, which passes it on."""

_WORKERS_WAIT = 30
"""Seconds that a loader's worker goes on for after SIGTERM: its rank still needs batches."""

_asked: list[str] = []


def asked() -> str | None:
    """The first signal heard since `hearing` began, None without."""
    return _asked[0] if _asked else None


def ask(name: str) -> None:
    """Make `asked` say `name`: for launchers whose ranks cannot be sent signals."""
    if not _asked:
        _asked.append(name)


def listen() -> None:
    """Hear signals from now on, for the rest of this process, and those that `held_back` kept."""
    _install(lambda number, frame: ask(signal.Signals(number).name))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def held_back() -> Iterator[None]:
    """Processes started meanwhile get no signal before they `listen`: an interpreter needs a while
    until it can, and would die of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def hearing(tell: Callable[[str], None] = ask) -> Iterator[None]:
    """Hear signals for the time being; does nothing in a thread, where Python allows no handlers.

    Args:
        tell: called with the name of the signal, in the main thread.
    """
    before = _install(lambda number, frame: tell(signal.Signals(number).name))
    if before:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher may have kept some for us
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.clear()


def _install(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    owner, heard = os.getpid(), dict[int, float]()

    def hear(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            _as_a_worker(number)
        elif time.monotonic() - heard.setdefault(number, time.monotonic()) > INSIST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(owner, number)
        else:
            handler(number, frame)

    return {number: signal.signal(number, hear) for number in SIGNALS}


def _as_a_worker(number: int) -> None:
    """A loader's worker has inherited the handler. Slurm signals every process of a step."""
    if number == signal.SIGTERM:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_WORKERS_WAIT)
