"""One rank: from its task to its result (hop 6). Run as ``python -m distributed.launch.rank_process``."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distributed.checkpoint.run_directory import RUN
from distributed.interfaces.backend import Backend
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.launch.script_settings import apply_settings
from distributed.resilience.failure_reports import FailureBoard, FailureReport, forget_chosen_batch
from distributed.resilience.flight_dumps import leave_dump
from distributed.resilience.monitor_process import MonitoredRank
from distributed.resilience.phase_journal import FAILED, freeze_journal
from distributed.resilience.preemption import install_handlers
from distributed.system.disk_room import needs_room, write_with_reserve
from distributed.system.garbage_collection import collect_as_usual, spare_imports
from distributed.system.output import flush_output

if TYPE_CHECKING:
    from distributed.training.loop import TrainingLoop

__all__ = ["RankPayload", "main", "report_error", "run_folder", "run_here", "watch_parent"]


RESULT = "result.json"
"""File in the folder of a run in which rank 0 of a host leaves the result."""

_ENDED: list[Any] = []
"""Loops that are done. Freeing DDP's reducer while gloo's threads still hold tensors can
deadlock (both want the interpreter's lock), so a rank leaves that to the end of its process."""


@dataclass
class RankPayload:
    """The plan and task of a rank, pickled once to a private file.

    Attributes:
        tracker_contexts: tracker name -> what its `capture` returned in the caller.
        choose: makes the plan of these ranks, once they have met: what they decide together.
        script_settings: the caller's settings of `logging` and `warnings`.
        probe: called in place of training; returns what the caller reads.
        module_globals: see `returned_objects.module_globals`.
    """

    plan: RunPlan
    task: Task
    tracker_contexts: dict[str, Any] = field(default_factory=dict)
    choose: Callable[[RunPlan, Task, Backend], RunPlan] | None = None
    script_settings: bytes | None = None
    probe: Callable[[RunPlan, Task, Backend, Path], dict[str, Any]] | None = None
    module_globals: dict[tuple[str, str], bytes] = field(default_factory=dict)


def run_here(
    job: RankPayload, result_dir: Path | None = None, monitor: Callable[[RunPlan], Any] = MonitoredRank
) -> Any:
    """Run one rank: set up the backend, train and return the loop; None after a probe.

    Args:
        result_dir: folder for the final state and ``result.json``; None writes neither. A probe needs it.
        monitor: makes what observes the rank.
    """
    from distributed.registry.catalog import get_catalog

    # A scheduler that travelled has lost its mark on optimizer.step, and would warn.
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
    # A run that was preempted in the last step of an epoch resumes with the epoch's end.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    plan = job.plan
    forget_chosen_batch()
    backend = get_catalog().load_backend(plan.spec)
    board, observed = None, monitor(plan)
    try:
        backend.setup(plan)
        observed.joined(backend)
        board = _board(plan, backend)
        if job.choose is not None:
            plan = job.choose(plan, job.task, backend)
        ended = (_train if job.probe is None else _probe)(job, plan, backend, result_dir)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again, or as its cause
        freeze_journal()
        leave_dump()
        cause = board.settle(error, observed.find_report) if board else error
        if cause is error:
            observed.tell(error)
        if plan.mode != "spawn":
            # A started rank only has to report and to end, which taking a group down may delay.
            backend.teardown()
        if board and cause is error:
            board.linger()
        observed.end(FAILED)
        raise cause from (None if cause is error else error)
    observed.end()
    backend.teardown()
    return ended


def _train(job: RankPayload, plan: RunPlan, backend: Backend, result_dir: Path | None) -> TrainingLoop:
    from distributed.launch.returned_objects import LeftObjects, take_globals
    from distributed.registry.catalog import get_catalog
    from distributed.training.loop import TrainingLoop

    loop = TrainingLoop(plan, job.task, backend, get_catalog(), job.tracker_contexts)
    starts_here = result_dir is not None and backend.world.rank == 0
    take_globals(job.task, job.module_globals)
    objects = LeftObjects(loop) if starts_here else None
    try:
        loop.run()
        if result_dir is not None:
            _leave_result(loop, plan, result_dir)
            if objects is not None:
                objects.leave(result_dir)
    finally:
        loop.trackers.finish("failed")
    return loop


def _probe(job: RankPayload, plan: RunPlan, backend: Backend, result_dir: Path | None) -> None:
    assert job.probe is not None
    assert result_dir is not None
    found = job.probe(plan, job.task, backend, result_dir)
    if backend.world.local_rank == 0:
        with needs_room("the result of the run", result_dir):
            write_with_reserve(result_dir / RESULT, json.dumps(found).encode())


def _board(plan: RunPlan, backend: Backend) -> FailureBoard | None:
    """The failure board; None on a single node of our own, where the supervisor finds the cause."""
    store = getattr(backend, "store", None)
    watched = plan.mode != "join" and plan.num_nodes == 1
    return None if watched or store is None else FailureBoard(store, backend.world.rank)


def _leave_result(loop: TrainingLoop, plan: RunPlan, folder: Path) -> None:
    from distributed.launch.final_state import leave_state

    state = leave_state(loop, plan, folder)
    if loop.world.local_rank == 0:
        history = loop.backend.broadcast_object(loop.history.to_dict())
        result = {"history": history, "progress": asdict(loop.progress), "state": asdict(state)}
        with needs_room("the result of the run", folder):
            write_with_reserve(folder / RESULT, json.dumps(result).encode())
    else:
        loop.backend.broadcast_object(None)


def main() -> int:
    """Entry point of a rank that `launch` started: its task, or the script in its arguments."""
    watch_parent()
    if os.environ.get("DISTRIBUTED_HEEDS_SIGNALS"):
        install_handlers()
    if len(sys.argv) > 1:
        del sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    return run_folder(Path(os.environ["DISTRIBUTED_RUN_DIR"]))


def run_folder(folder: Path) -> int:
    """Run the task in `folder` and leave its result or an error report there; returns 0 or 1."""
    spare_imports()
    try:
        from distributed.communication.task_file import load_task

        sys.path[:] = json.loads((folder / "sys_path.json").read_text(encoding="utf-8"))
        job: RankPayload = load_task(folder / "task.bin")
        if job.script_settings is not None:
            apply_settings(job.script_settings)
        job.plan = _as_placed(job.plan, os.environ)
        _ENDED.append(run_here(job, folder))
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank has to be reported
        report_error(error, folder)
        _ENDED.append(error)
        return 1
    finally:
        collect_as_usual()
    return 0


def _as_placed(plan: RunPlan, env: Mapping[str, str]) -> RunPlan:
    """`plan`, where this rank has come to be: remote launchers and elastic runs only know by then."""
    from distributed.planner.resolve import rescale

    if not plan.spec.remote and not plan.counts:
        return plan
    nodes, local_size = int(env["GROUP_WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    placed = replace(rescale(plan, 1, int(env["WORLD_SIZE"])), lease=env.get(RUN, ""))
    return replace(placed, local_size=local_size, node_rank=int(env["GROUP_RANK"]), num_nodes=nodes)


def report_error(error: BaseException, folder: Path) -> None:
    """Write ``error_<rank>.json`` at once, because the launcher names the first failure."""
    rank = int(os.environ.get("RANK", "0"))
    FailureReport.from_error(error, rank).write(folder, rank)


def watch_parent() -> None:
    """End this rank and all it started when the launcher's end of the pipe closes, and remove
    the run's private folder, which its owner can no longer do."""
    descriptor = os.environ.pop("DISTRIBUTED_PARENT_FD", None)
    if descriptor is None:
        return

    def watch() -> None:
        os.read(int(descriptor), 1)
        shutil.rmtree(os.environ["DISTRIBUTED_RUN_DIR"], ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()


def leave(status: int) -> NoReturn:
    """End the process without unwinding native threads.

    A process group's threads may still run when the interpreter dies, and then abort a rank
    whose work is done and saved.
    """
    atexit._run_exitfuncs()
    flush_output()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
