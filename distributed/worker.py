"""One rank: from its task to its result (hop 6). Run as ``python -m distributed.worker``."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.interfaces.task import Task
    from distributed.loop import TrainingLoop
    from distributed.plan import RunPlan

__all__ = ["RankJob", "main", "report_error", "run_folder", "run_here", "watch_parent"]


_ENDED: list[Any] = []
"""Loops that are done. Freeing DDP's reducer while gloo's threads still hold tensors can
deadlock (both want the interpreter's lock), so a rank leaves that to the end of its process."""


@dataclass
class RankJob:
    """What a rank is told. Written once to a private file.

    Attributes:
        plan: hop 4's result.
        task: the user's objects.
        tracker_contexts: tracker name -> what its `capture` returned in the caller.
    """

    plan: RunPlan
    task: Task
    tracker_contexts: dict[str, Any] = field(default_factory=dict)


def run_here(job: RankJob, result_dir: Path | None = None) -> TrainingLoop:
    """Be one rank: set up the backend, train, hand back the loop.

    Args:
        job: what to do.
        result_dir: where to leave the final state and ``result.json``, or None.
    """
    from distributed.loop import TrainingLoop
    from distributed.plugin_manager import get_catalog

    # A scheduler that travelled has lost its mark on optimizer.step, and would warn.
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
    catalog = get_catalog()
    backend = catalog.load_backend(job.plan.spec)
    try:
        backend.setup(job.plan)
        loop = TrainingLoop(job.plan, job.task, backend, catalog, job.tracker_contexts)
        loop.run()
        if result_dir is not None:
            _leave_result(loop, job.plan, result_dir)
        return loop
    finally:
        backend.teardown()


def _leave_result(loop: TrainingLoop, plan: RunPlan, folder: Path) -> None:
    from distributed.transport import write_private

    if plan.config.return_weights != "none":
        loop.export_result(str(folder / "state"))
    if loop.world.local_rank == 0:
        history = loop.backend.broadcast_object(loop.history.to_dict())
        result = {"history": history, "progress": asdict(loop.progress)}
        write_private(folder / "result.json", json.dumps(result).encode())
    else:
        loop.backend.broadcast_object(None)


def main() -> int:
    """Entry point of a rank that `launch` started."""
    watch_parent()
    return run_folder(Path(os.environ["DISTRIBUTED_RUN_DIR"]))


def run_folder(folder: Path) -> int:
    """Run the task in `folder` and leave its result or an error report there; 0 when it went well."""
    try:
        from distributed.transport import load_task

        sys.path[:] = _caller_path(folder)
        job: RankJob = load_task(folder / "task.bin")
        _ENDED.append(run_here(job, folder))
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank has to be reported
        report_error(error, folder)
        return 1
    return 0


def _caller_path(folder: Path) -> list[str]:
    path: list[str] = json.loads((folder / "sys_path.json").read_text(encoding="utf-8"))
    return path


def report_error(error: BaseException, folder: Path) -> None:
    """Leave ``error_<rank>.json`` for the launcher, at once: it decides who was first."""
    from distributed.transport import write_private

    rank = int(os.environ.get("RANK", "0"))
    report: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "exc_type": type(error).__name__,
        "what": f"raised {type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, UserError):
        report["user_error"] = {
            "message": error.message,
            "field": error.field,
            "allowed": error.allowed,
            "got": None if error.got is None else _plain(error.got),
            "remedy": error.remedy,
        }
    write_private(folder / f"error_{rank}.json", json.dumps(report).encode())


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else repr(value)


def watch_parent() -> None:
    """End this rank and all it started when the launcher's end of the pipe closes."""
    descriptor = os.environ.pop("DISTRIBUTED_PARENT_FD", None)
    if descriptor is None:
        return

    def watch() -> None:
        os.read(int(descriptor), 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()


def leave(status: int) -> NoReturn:
    """End the process without unwinding native threads.

    A process group's threads may still run when the interpreter dies, and then abort a rank
    whose work is done and saved.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
