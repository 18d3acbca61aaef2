"""Processes as the kernel reports them (state, CPU time, children, kills for lack of memory), and the
environment and standard error of this one."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLOCK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """State of a process.

    Attributes:
        state: the kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z is dead;
            empty when there is no such process.
        seconds: CPU time used, in seconds.
        age: seconds since the start.
    """

    state: str
    seconds: float
    age: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.state not in ("", "Z", "X")


def process_info(pid: int) -> Process:
    """State, CPU time and age of a process."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return Process("", 0.0)
    fields = text.rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _CLOCK
    return Process(fields[0], (int(fields[11]) + int(fields[12])) / _CLOCK, age)


def queued_seconds(pid: int) -> float:
    """Seconds that the threads of a process could have run and had no core; 0 if the kernel does not count
    them. The kernel adds those of a thread when it next gets one; threads that have ended do not count."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    counts = [_read(str(task)).split() for task in tasks]
    return sum(int(count[1]) for count in counts if len(count) > 1) / 1e9


def is_runnable(pid: int) -> bool:
    """Return true if a thread of a process runs, or could if it had a core."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return any(_read(str(task)).rpartition(")")[2].split()[:1] == ["R"] for task in tasks)


def children(pid: int) -> Iterator[int]:
    """Pids of the child processes, among them DataLoader workers."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text(encoding="ascii").split())
        except OSError:
            continue  # a thread that has just ended


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def oom_kills() -> int:
    """Number of processes of this cgroup killed for lack of memory so far; 0 if the kernel has no count."""
    total = 0
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            total += _read_count(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            total += _read_count(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return total


def _read_count(path: str) -> int:
    found = re.search(r"^oom_kill (\d+)$", _read(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """`os.environ` with `variables`, and as it was afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def filtered_stderr(is_noise: Callable[[bytes], object]) -> Iterator[None]:
    """Hold back what is written to file descriptor 2, and show the lines that are not noise at the end.

    Args:
        is_noise: called with each line; a true result drops it.
    """
    sys.stderr.flush()
    try:
        shown = os.dup(2)
    except OSError:  # Standard error is closed: there is nothing to suppress.
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            kept.seek(0)
            os.write(2, b"".join(line for line in kept if not is_noise(line)))
