"""Python stacks of running processes, requested by a signal; works while a rank is blocked in C code."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from distributed.system.processes import handles_signal

# Not SIGUSR2, which batch systems and scripts use.
_SIGNAL = signal.SIGRTMIN + 5
_PATIENCE = 1.0
"""Seconds to wait for a rank to write its stack."""
_LIBRARIES = (f"/lib/python{sys.version_info[0]}.", "/site-packages/", "/dist-packages/")
_HERE = f"{Path(__file__).parents[1]}{os.sep}"

_open: list[IO[bytes]] = []


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


def stack_path(folder: Path, rank: int) -> Path:
    """The file to which that rank writes its stacks."""
    return folder / f"stacks_{rank}"


def enable_dumps(folder: Path, rank: int) -> None:
    """Write all threads' stacks to `stack_path` on request, and in a crash of native code.

    Loader workers that are forked from this process do so as well, into the same file.
    """
    for old in _open:
        faulthandler.unregister(_SIGNAL)
        old.close()
    descriptor = os.open(stack_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    _open[:] = [os.fdopen(descriptor, "ab", buffering=0)]
    faulthandler.register(_SIGNAL, file=_open[0], all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=_open[0], all_threads=True)


def request_dump(pid: int, path: Path) -> str:
    """Request the stacks of `pid`: the text that it writes to `path`; empty if it writes none."""
    if not handles_signal(pid, _SIGNAL):
        return ""
    start = path.stat().st_size
    try:
        os.kill(pid, _SIGNAL)
    except (ProcessLookupError, PermissionError):
        return ""
    size, deadline = start, time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before, size = size, path.stat().st_size
        if size > start and size == before:
            break
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def parse(text: str, thread: int | None = None) -> list[Frame]:
    """The frames of `thread`, the most recent first; by default of the thread that got the signal."""
    blocks: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    chosen = ""
    for line in text.splitlines():
        if head := re.match(r"(Current t|T)hread 0x([0-9a-f]+)", line):
            frames = blocks[head[2].lstrip("0")] = []
            chosen = head[2].lstrip("0") if head[1] == "Current t" or not chosen else chosen
        elif found := re.match(r'  File "(.*)", line (\d+) in (.*)', line):
            frames.append(Frame(found[1], int(found[2]), found[3]))
    wanted = f"{thread:x}" if thread else chosen
    return blocks.get(wanted, blocks.get(chosen, []))


def innermost(stack: Sequence[Frame], number: int = 8) -> list[str]:
    """The last `number` calls of a stack, the most recent one last as in a traceback. Calls of the
    user's program are always included."""
    own = [index for index, frame in enumerate(stack) if _is_own(frame)]
    last = max(number, own[0] + 1) if own else number
    return [str(frame) for frame in reversed(stack[:last]) if not _is_ours(frame) or not own]


def own_line(stack: Sequence[Frame]) -> str:
    """The innermost call in the user's program; empty if there is none."""
    return next((str(frame) for frame in stack if _is_own(frame)), "")


def _is_own(frame: Frame) -> bool:
    return not (
        _is_ours(frame) or frame.file.startswith("<") or any(part in frame.file for part in _LIBRARIES)
    )


def _is_ours(frame: Frame) -> bool:
    ours = frame.file.startswith(_HERE) or "/distributed_backends/" in frame.file
    return ours and not frame.file.startswith(f"{_HERE}testing{os.sep}")
