"""Dumps of torch's Flight Recorder: each rank writes them on request and at a failure; the monitor collects.

A thread of the rank waits on a named pipe for requests, as it can still dump while the training loop's thread
is blocked in a collective. torch's NCCL watchdog writes a dump of its own before it ends a process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed.resilience.flight_records import MAX_BYTES, OFF, FlightRecord, read_record
from distributed.system.private_files import write_private

__all__ = [
    "answer_requests",
    "collect",
    "dump_recorder",
    "keep_dumps",
    "leave_dump",
    "recorder_missed",
    "recorder_off",
    "stop_answers",
    "switch_on",
]

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Environment variables with the number of recorded entries, the one that takes precedence first."""
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENTRIES = "2000"
_PATIENCE = 1.0
"""Seconds in which the ranks have to answer a request."""
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's functions: NCCL's recorder exists in builds with NCCL only."""


# -- in a rank -------------------------------------------------------------------------


def switch_on(folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Switch the recorder on and direct the dumps of NCCL's watchdog to `folder`.

    Variables that are set already keep their values. torch reads them at the first collective, so that this
    has to be called before a process group is made.
    """
    if not any(name in environment for name in SIZES):
        environment[SIZES[0]] = _ENTRIES
    if not any(name in environment for name in _FILES):
        environment[_FILES[0]] = str(folder / "flight_watchdog_")
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def recorder_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment switches the recorder off."""
    return next((environment[name] for name in SIZES if name in environment), _ENTRIES).strip() == "0"


def recorder_missed(device: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to warn ranks of another launcher that the recorder is off: on GPUs, as a hang of NCCL shows
    nothing else."""
    return device.startswith("cuda") and recorder_off(environment)


class _Listener:
    """Writes a dump for each byte that arrives through the rank's pipe."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        for path in (*_candidates(folder, rank), _pipe(folder, rank)):
            path.unlink(missing_ok=True)  # of an earlier round of an elastic run
        os.mkfifo(_pipe(folder, rank), 0o600)
        # Opened for both: a pipe without a writer would be at its end.
        self.descriptor = os.open(_pipe(folder, rank), os.O_RDWR | os.O_CLOEXEC)
        self.thread = threading.Thread(target=self._serve, daemon=True, name="flight-recorder")
        self.thread.start()

    def _serve(self) -> None:
        while os.read(self.descriptor, 1) == b"?":
            with suppress(OSError):
                self.write("flight_")
        os.close(self.descriptor)

    def stop(self) -> None:
        with suppress(OSError):
            os.write(self.descriptor, b".")
            self.thread.join(_PATIENCE)

    def write(self, prefix: str) -> None:
        write_private(self.folder / f"{prefix}{self.rank}", dump_recorder())


_listeners: list[_Listener] = []


def answer_requests(folder: Path, rank: int) -> None:
    """Answer the requests of `collect` for this rank until the process ends, or until it is called again.

    Raises:
        OSError: the pipe cannot be made in `folder`.
    """
    stop_answers()
    _listeners.append(_Listener(folder, rank))


def stop_answers() -> None:
    """Answer no more requests."""
    while _listeners:
        _listeners.pop().stop()


def leave_dump() -> None:
    """Write a dump because this rank fails. Never raises: the failure is what has to be reported."""
    for listener in _listeners:
        with suppress(Exception):
            listener.write("flight_failed_")


def dump_recorder() -> bytes:
    """torch's pickle; `OFF` when the recorder is off, and empty in a process that has not used torch.

    Of two recorders, NCCL's counts if it holds a collective.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = [getattr(module, name) for name in _DUMPS if hasattr(module, name)]
    if not functions:
        return b""
    if recorder_off():
        return OFF
    dumps: list[bytes] = [function(True, True, False) for function in functions]
    return next((dump for dump in dumps if b"profiling_name" in dump), b"")


# -- in the monitor --------------------------------------------------------------------


def collect(folder: Path, pids: Mapping[int, int], alive: Iterable[int]) -> list[FlightRecord]:
    """The records of the ranks of `pids`; one of `alive` that has left none at a failure is asked for it.

    A rank without a dump has a record that says so, if another rank has recorded collectives: the ranks of
    other frameworks record none.
    """
    before = {rank: _stamp(folder, rank) for rank in sorted(pids)}
    running = {rank for rank in alive if rank in before and not _candidates(folder, rank)[1].exists()}
    asked = {rank for rank in running if _ask(folder, rank)}
    deadline = time.monotonic() + _PATIENCE
    while any(_stamp(folder, rank) == before[rank] for rank in asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    records, missing = [], []
    for rank in before:
        answered = rank not in asked or _stamp(folder, rank) != before[rank]
        # The answer to an earlier request says nothing of a rank that has ended since.
        paths, ended = _candidates(folder, rank), rank not in asked
        fresh = answered and (not ended or _newest(paths) != paths[0])
        record = _read(paths, rank, fresh)
        if record is not None:
            records.append(record)
        else:
            why = "it did not answer the request for one" if not answered else "it ended without one"
            missing.append(FlightRecord(rank, problem=f"there is no dump: {why}"))
    return records + missing if any(record.collectives for record in records) else records


def _read(paths: tuple[Path, ...], rank: int, fresh: bool) -> FlightRecord | None:
    try:
        return read_record(paths, rank, fresh)
    except OSError as error:
        return FlightRecord(rank, problem=f"its dump cannot be read ({error.strerror})")


def keep_dumps(folder: Path, report: str) -> str:
    """Copy the newest dump of each rank in `folder` beside `report`, readable by this user only.

    Returns:
        the new folder, for ``torchfrtrace <folder> --prefix rank_``; empty if there is nothing to keep, or
        it cannot be written.
    """
    target = Path(f"{report.removesuffix('.txt')}_flight_recorder")
    kept = False
    for rank in sorted({int(path.name.rpartition("_")[2]) for path in folder.glob("flight_*[0-9]")}):
        with suppress(OSError):
            newest = _newest(_candidates(folder, rank))
            if newest is None or not len(OFF) < newest.stat().st_size <= MAX_BYTES:
                continue
            target.mkdir(mode=0o700, exist_ok=True)
            write_private(target / f"rank_{rank}", newest.read_bytes())
            kept = True
    return str(target) if kept else ""


def _ask(folder: Path, rank: int) -> bool:
    """Send a request; return whether the rank has a pipe with a reader."""
    try:
        descriptor = os.open(_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(descriptor, b"?") == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _stamp(folder: Path, rank: int) -> Any:
    """What changes when the rank writes its answer: the file is replaced as a whole."""
    try:
        found = _candidates(folder, rank)[0].stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _newest(paths: Iterable[Path]) -> Path | None:
    return max(
        (path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime_ns, default=None
    )


def _candidates(folder: Path, rank: int) -> tuple[Path, Path, Path]:
    """The answer to a request, the dump at a failure, and that of torch's watchdog."""
    return folder / f"flight_{rank}", folder / f"flight_failed_{rank}", folder / f"flight_watchdog_{rank}"


def _pipe(folder: Path, rank: int) -> Path:
    return folder / f"flight_{rank}.request"
