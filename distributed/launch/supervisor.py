"""Start the ranks of this host, wait for them, and report the first failure."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from distributed.launch import child_process
from distributed.launch.child_process import ChildProcess
from distributed.launch.warm_start import WarmServer
from distributed.resilience.failure_reports import GRACE, FailureReport, find_cause
from distributed.resilience.preemption import INTERRUPT, catch_signals, signals_blocked
from distributed.resilience.rank_monitor import WATCHED, RankMonitor
from distributed.system.output import write_text


@dataclass
class _Rank:
    rank: int
    process: ChildProcess
    status: int | None = None
    ended: float = 0.0
    watcher: threading.Thread = field(init=False)


class Supervisor:
    """The ranks of one host, each in a process group of its own.

    Each rank holds the read end of a pipe whose write end is here: if this process
    vanishes, the ranks see the end of the file and end themselves (`rank_process.watch_parent`).

    Args:
        argv: command of every rank.
        envs: rank -> environment.
        folder: folder of the ranks' ``error_<rank>.json``.
        watch: monitor that detects hangs and explains failures; None disables both.
        heeds_signals: SIGTERM, SIGUSR1 and SIGINT to this process are passed on to the ranks, which save,
            end themselves and leave a result.
        preload: modules that a fork server imports before it forks a rank.
        warm: the fork server of this process; None without one.

    Attributes:
        received_signal: name of the signal that this process received; None without one.
    """

    received_signal: str | None = None
    _requested: str | None = None

    def __init__(
        self,
        argv: Sequence[str],
        envs: Mapping[int, Mapping[str, str]],
        folder: Path,
        watch: RankMonitor | None = None,
        heeds_signals: bool = False,
        preload: Sequence[str] = (),
        warm: WarmServer | None = None,
    ) -> None:
        self.argv, self.envs, self.folder = list(argv), envs, folder
        self.watch, self.heeds_signals, self.preload = watch, heeds_signals, preload
        self.warm = warm
        self._ranks: list[_Rank] = []
        self.ended: queue.Queue[_Rank] = queue.Queue()
        self._pipe: tuple[int, int] | None = None
        self._relays: list[threading.Thread] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def run(self) -> None:
        """Start all ranks and return when all have ended well.

        Raises:
            WorkerError, UserError: as `Launcher.run`.
        """
        with catch_signals(self._on_signal) if self.heeds_signals else nullcontext():
            try:
                self.start()
                self.wait()
            finally:
                self.stop()

    def _on_signal(self, name: str) -> None:
        if name == INTERRUPT.name:
            # A user waits for an effect. Not by print, which the signal may have interrupted.
            os.write(2, b"interrupted: the ranks save at their next step; Ctrl-C again ends them at once\n")
        self.received_signal = name
        self.request_stop(name)

    def request_stop(self, name: str = "SIGUSR1") -> None:
        """Make every rank save at its next step and end; `wait` returns when they have.

        Args:
            name: signal to send; a rank also receives SIGTERM if its whole group was sent it.
        """
        self._requested = name
        for entry in self._ranks:
            if entry.status is None:
                os.kill(entry.process.pid, signal.Signals[name])

    def start(self) -> None:
        """Start every rank."""
        self._pipe = os.pipe()
        own = {WATCHED: str(int(self.watch is not None))}
        if self.heeds_signals:
            own["DISTRIBUTED_HEEDS_SIGNALS"] = "1"
        for rank, env in self.envs.items():
            with signals_blocked() if self.heeds_signals else nullcontext():
                process = child_process.start(
                    self.argv,
                    {**env, **own, "DISTRIBUTED_PARENT_FD": str(self._pipe[0])},
                    piped=not (rank == 0 and _is_terminal_or_file(sys.stdout)),
                    pass_fds=[self._pipe[0]],
                    preload=self.preload,
                    warm=self.warm,
                )
            entry = _Rank(rank, process)
            self._ranks.append(entry)
            if self._requested is not None:  # the signal arrived before this rank could receive it
                os.kill(process.pid, signal.Signals[self._requested])
            entry.watcher = _thread(self._watch, entry)
            if process.stdout is not None:
                self._relays.append(_thread(_relay, process.stdout, f"[rank {rank}] " if rank else ""))

    def wait(self) -> None:
        """Block until every rank has ended, or one has failed."""
        running = len(self._ranks)
        while running:
            entry = self._next_end()
            running -= 1
            if entry.status != 0:
                self._await_ends()
                self._raise_first()

    def _next_end(self) -> _Rank:
        """The next rank that ends; monitors the others meanwhile."""
        while self.watch is not None:
            try:
                return self.ended.get(timeout=self.watch.period)
            except queue.Empty:
                self.watch.look({e.rank: e.process.pid for e in self._ranks if e.status is None})
        return self.ended.get()

    def stop(self) -> None:
        """End the remaining ranks and their children: SIGTERM, then SIGKILL; SIGKILL at once if ranks
        react to SIGTERM only at their next step."""
        for entry in (entry for entry in self._ranks if entry.status is None):
            _signal_group(entry.process.pid, signal.SIGKILL if self.heeds_signals else signal.SIGTERM)
        self._await_ends()
        for entry in self._ranks:
            # The leader is not reaped yet, so its group id cannot be reused.
            _signal_group(entry.process.pid, signal.SIGKILL)
        for entry in self._ranks:
            entry.watcher.join()
            entry.process.reap()
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None
        for thread in self._relays:
            thread.join(timeout=GRACE)
        if self.watch is not None:
            self.watch.close()

    def _watch(self, entry: _Rank) -> None:
        """Detect the end of a rank without reaping it."""
        status = entry.process.wait_end()
        entry.ended, entry.status = time.time(), status
        self.ended.put(entry)

    def _await_ends(self) -> None:
        """Wait until every rank has ended, `GRACE` seconds at most."""
        deadline = time.monotonic() + GRACE
        while (
            any(entry.status is None for entry in self._ranks) and (left := deadline - time.monotonic()) > 0
        ):
            with suppress(queue.Empty):
                self.ended.get(timeout=left)

    def _raise_first(self) -> NoReturn:
        reports = [self._report(entry) for entry in self._ranks if entry.status not in (None, 0)]
        first, failed = find_cause(reports), [report.rank for report in reports]
        if self.watch is not None:
            first = self.watch.explain(first, failed, {e.rank: e.process.pid for e in self._ranks})
        raise first.to_error(failed)

    def _report(self, entry: _Rank) -> FailureReport:
        """The report of a failed rank: its own, or one made from its exit status."""
        own = FailureReport.read(self.folder, entry.rank)
        if own is not None:
            return own
        status = entry.status or 0
        exc_type, what = "SystemExit", f"exited with code {status} and left no report"
        if status < 0:
            exc_type = signal.Signals(-status).name
            hint = "; the host may have run out of memory" if exc_type == "SIGKILL" else ""
            what = f"was terminated by {exc_type}{hint}"
        return FailureReport(entry.rank, exc_type, what, pid=entry.process.pid, time=entry.ended)


def _thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _relay(stream: IO[bytes], prefix: str) -> None:
    """Copy a rank's lines to this process's `sys.stdout` (a notebook's cell, a test)."""
    for line in stream:
        # Keep reading, because a rank whose pipe is full blocks in its next print.
        write_text(prefix + line.decode(errors="replace"), sys.stdout)


def _is_terminal_or_file(stream: Any) -> bool:
    try:
        return stream is not None and stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
