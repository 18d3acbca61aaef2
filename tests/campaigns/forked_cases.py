"""Run many cases that may crash, hang or take too much memory, each under limits, in forked processes."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CPU_SECONDS", "MEMORY", "Outcome", "run_cases"]

CPU_SECONDS = 5.0
"""Processor time of one case."""
_WALL_SECONDS = 60.0
"""Wall-clock time of one case, which is longer because the machine may be busy with other work."""
MEMORY = 200 << 20
"""Bytes that the cases of one process may take in addition to what it began with."""
_BATCH = 100


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        number: of the case.
        verdict: what the case returned; ``crashed`` or ``raised`` when it did not return.
        detail: one line.
        seconds: processor time.
    """

    number: int
    verdict: str
    detail: str
    seconds: float


def run_cases(case: Callable[[int], tuple[str, str]], numbers: range) -> list[Outcome]:
    """What ``case(number)`` returns for each number: (verdict, detail).

    A signal, such as SIGSEGV or that of a limit, ends one case, and the next begins in a new process.
    """
    outcomes: list[Outcome] = []
    left = list(numbers)
    while left:
        found, status = _run_batch(case, left[:_BATCH])
        outcomes += found
        left = left[len(found) :]
        if status and left:
            outcomes.append(Outcome(left.pop(0), "crashed", status, 0.0))
    return outcomes


def _run_batch(case: Callable[[int], tuple[str, str]], numbers: list[int]) -> tuple[list[Outcome], str]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(case, numbers, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        found = [Outcome(*json.loads(line)) for line in lines]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found, "" if code == 0 else f"the process ended with {_named(code)}"


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _work(case: Callable[[int], tuple[str, str]], numbers: list[int], writing: int) -> None:
    code = 1
    # Destructors of what the tests before have left, such as channels of gRPC, crash in a forked process.
    gc.freeze()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        used = pages * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
            before = time.process_time()
            verdict, detail = _attempt(case, number)
            outcome: list[Any] = [number, verdict, detail[:2000], time.process_time() - before]
            os.write(writing, json.dumps(outcome).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _attempt(case: Callable[[int], tuple[str, str]], number: int) -> tuple[str, str]:
    try:
        return case(number)
    except BaseException:  # noqa: BLE001 - what a case may not raise
        return "raised", " | ".join(traceback.format_exc().split("\n")[-6:])
