"""Preemption: catch the SIGTERM and SIGUSR1 that schedulers send before they take a machine, and Ctrl-C.

The signal handler only records the signal. The training loop reads `received_signal`, agrees with the
other ranks on a step, saves there and ends the run.
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
from weakref import WeakSet

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that Slurm, Kubernetes and cloud providers send before they take a machine."""

INTERRUPT = signal.SIGINT
"""Ctrl-C. Caught where Python's own handler is in place: a shell starts programs in the background with it
ignored, and a program may have a handler of its own."""

INSIST = 2.0
"""Seconds after which a repeated signal kills the process. Schedulers send the first one to a process
and to its parent, which passes it on."""
_INSIST_ON_INTERRUPT = 0.2
"""Seconds after which a second Ctrl-C is one: ``timeout -s INT`` sends two at once."""

_WORKERS_WAIT = 30
"""Seconds that a DataLoader worker continues after SIGTERM, because its rank still needs batches."""

_CAUGHT = (*SIGNALS, INTERRUPT)
_handlers = WeakSet[Any]()
"""Handlers that `_install` made, which a later one replaces."""
_received: list[str] = []


def received_signal() -> str | None:
    """Name of the first signal since `catch_signals` began; None without one."""
    return _received[0] if _received else None


def record_signal(name: str) -> None:
    """Make `received_signal` return `name`, for launchers whose ranks cannot be sent signals."""
    if not _received:
        _received.append(name)


def install_handlers() -> None:
    """Catch signals for the rest of this process, including those that `signals_blocked` deferred. Ctrl-C
    is one of them in any case: the launcher passes on its own."""
    signal.signal(INTERRUPT, signal.default_int_handler)
    _install(lambda number, frame: record_signal(signal.Signals(number).name))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals in processes started inside ``with`` until they call `install_handlers`; a signal
    during the interpreter's start would kill them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def catch_signals(on_signal: Callable[[str], None] = record_signal) -> Iterator[None]:
    """Catch signals inside ``with``; does nothing in a thread, where Python allows no handlers.

    Args:
        on_signal: function called with the name of the signal, in the main thread.

    Raises:
        KeyboardInterrupt: a second Ctrl-C.
    """
    before = _install(lambda number, frame: on_signal(signal.Signals(number).name))
    if before:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)  # deferred by the launcher's `signals_blocked`
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


def _install(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    owner, first = os.getpid(), dict[int, float]()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            _handle_in_loader_worker(number)
            return
        now = time.monotonic()
        since = now - first.setdefault(number, now)
        if number == INTERRUPT and since > _INSIST_ON_INTERRUPT:
            raise KeyboardInterrupt
        if since > INSIST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(owner, number)
            return
        handler(number, frame)

    _handlers.add(handle)
    usual = signal.getsignal(INTERRUPT) in (signal.default_int_handler, *_handlers)
    return {number: signal.signal(number, handle) for number in (_CAUGHT if usual else SIGNALS)}


def _handle_in_loader_worker(number: int) -> None:
    """A DataLoader worker has inherited the handler, and Slurm signals every process of a step."""
    if number == signal.SIGTERM:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_WORKERS_WAIT)
