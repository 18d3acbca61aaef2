"""Start ranks or join those that a launcher started (hop 5)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from distributed.communication.rendezvous import Rendezvous
from distributed.communication.task_file import measure_task, save_task
from distributed.communication.torch_settings import check_modes
from distributed.communication.unpicklable import find_unpicklable
from distributed.config import DistributedConfig
from distributed.config.load import override
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.framework import Framework
from distributed.interfaces.history import History
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.interfaces.task import Progress, Task
from distributed.launch.caller_objects import bring
from distributed.launch.final_state import FinalState, check_room
from distributed.launch.forked import search_path
from distributed.launch.local_launcher import LocalLauncher
from distributed.launch.rank_process import RESULT, RankPayload, run_here
from distributed.launch.returned_objects import module_globals, take_objects
from distributed.launch.script_settings import read_settings
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog, load_target
from distributed.resilience.elastic import read_restarts
from distributed.system.devices import visible_gpus
from distributed.system.disk_room import RESERVE, lacks_room, needs_room, no_room, reserve
from distributed.system.private_files import write_private
from distributed.system.private_folders import PrivateFolder, start_sweep
from distributed.training.seeding import isolated_rng

__all__ = ["RunResult", "Rendezvous", "probe", "run", "run_script"]

logger = logging.getLogger("distributed")

# A rank imports from where its caller did: neither more (a file in the working folder may be
# called like a module) nor less (unpickling the task imports the caller's modules).
_BOOT = (
    "import json, os, sys; "
    "sys.path[:] = json.load(open(os.path.join(os.environ['DISTRIBUTED_RUN_DIR'], 'sys_path.json'))); "
    "from distributed.launch import rank_process; rank_process.leave(rank_process.main())"
)
_RANK = [sys.executable, "-P", "-c", _BOOT]


@dataclass
class RunResult:
    """The result of a run for the caller.

    Attributes:
        progress: position from which the next `fit` continues.
        state: folder of the final state when ranks were started; None when it is in this
            process's own objects.
        left: where the final state is, if it is not in `state`.
        run_state: scaler and the like, when the run was in this process.
        loop: the loop, when the run was in this process.
        held: digests of the caller's objects, which hold what training left.
    """

    history: History
    progress: Progress
    state: PrivateFolder | None = None
    left: FinalState = field(default_factory=FinalState)
    run_state: dict[str, Any] | None = None
    loop: Any = None
    held: dict[str, Any] | None = None

    def lost_state(self) -> UserError | None:
        """The error for a state that could not be left for the caller; None if there is none to report."""
        if not self.left.problem:
            return None
        assert self.state is not None
        newest = self.history.checkpoint
        return UserError(
            f"the run has finished, but its weights cannot return to this process: {self.left.problem}",
            field="TMPDIR",
            got=self.state.name,
            remedy="Set the environment variable TMPDIR to a folder with enough free space"
            + (f", and resume from {newest}, the newest checkpoint" if newest else " or set checkpoint_dir"),
        )


def run(
    plan: RunPlan,
    task: Task,
    tracker_contexts: Mapping[str, Any],
    launcher: Launcher | None = None,
    choose: Callable[[RunPlan, Task, Backend], RunPlan] | None = None,
) -> RunResult:
    """Run `task` by `plan`: in this process, as one of a launcher's ranks, or in new ranks.

    Args:
        tracker_contexts: tracker name -> what its `capture` returned here.
        launcher: starts the ranks instead of the backend's own launcher.
        choose: called in each rank when the ranks have met; returns the plan of the rank.

    Raises:
        UserError: a mistake that only a rank could see.
        WorkerError: a rank failed.
    """
    check_modes()
    if plan.mode == "spawn":
        plan = _profiled(plan)
    job = RankPayload(plan, task, dict(tracker_contexts), choose)
    if plan.mode != "spawn":
        with isolated_rng():
            loop = run_here(job)
            left = loop.leftover_state()
        return RunResult(loop.history, loop.progress, run_state=left, loop=loop)
    start_sweep()
    with needs_room("the files of the run", gettempdir()):
        folder = PrivateFolder()
    try:
        path = Path(folder.name)
        starter: Launcher = launcher or load_target(plan.spec.launcher)()
        starter.prepare(plan)
        framework: Framework = load_target(plan.spec.objects)()
        with bring(task, framework, path, plan):
            job.task = framework.pack(task)
            job.module_globals = module_globals(job.task)
            job.script_settings = read_settings()
            _save(job, path / "task.bin")
        check_room(plan, task, framework, path)
        starter.run(plan, RankCommand(_RANK, path))
        result = json.loads((path / RESULT).read_text(encoding="utf-8"))
        take_objects(task, path)
        for name in ("task.bin", RESERVE):
            (path / name).unlink(missing_ok=True)
        history = History.from_dict({**result["history"], "restarts": read_restarts(path)})
        final = FinalState(**result["state"])
        return RunResult(history, Progress(**result["progress"]), folder, final)
    except BaseException:
        folder.cleanup()
        raise


def probe(
    plan: RunPlan,
    task: Task,
    step: Callable[[RunPlan, Task, Backend, Path], dict[str, Any]],
    folder: Path,
    launcher: Launcher | None = None,
) -> dict[str, Any]:
    """Call `step` in new ranks in place of training. The ranks end with it, so that it changes nothing of
    this process, and a rank that the kernel ends does not end this process.

    Args:
        plan: of the ranks, on this host.
        step: ``(plan, task, backend, folder) ->`` what rank 0 returns to the caller, as JSON. The backend has
            been set up.
        folder: empty private folder of the ranks.
        launcher: starts the ranks instead of the backend's own launcher.

    Raises:
        UserError: a mistake that only a rank could see.
        WorkerError: a rank failed.
    """
    # Nothing is saved, so that no signal has to be waited for.
    config = plan.config.model_copy(update={"checkpoint_dir": None})
    plan = replace(plan, mode="spawn", joined=None, counts=(), config=config)
    starter: Launcher = launcher or load_target(plan.spec.launcher)()
    starter.prepare(plan)
    framework: Framework = load_target(plan.spec.objects)()
    _save(RankPayload(plan, framework.pack(task), probe=step), folder / "task.bin")
    starter.run(plan, RankCommand(_RANK, folder))
    found: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return found


def run_script(config: DistributedConfig, script: str, args: Sequence[str]) -> int:
    """Start `script` itself on every rank, as torchrun does, for scripts without our Trainer.

    Raises:
        WorkerError: a rank failed.
    """
    plan = resolve(
        # What such a script does about checkpoints and signals is its own.
        # Its imports are its own as well, so that a rank begins as a fresh process.
        override(config, {"launch": "spawn", "checkpoint_dir": None, "launch_start": "fresh"}, "per-rank"),
        get_catalog(),
        Facts(),
        Resources(visible_gpus() if config.device != "cpu" else 0),
    )
    start_sweep()
    with PrivateFolder() as folder:
        _save_path(Path(folder))
        LocalLauncher().run(plan, RankCommand([*_RANK, script, *args], Path(folder)))
    return 0


def _profiled(plan: RunPlan) -> RunPlan:
    """`plan`, with a profile of each rank if torch.profiler records in this process."""
    if not torch.autograd._profiler_enabled():
        return plan
    logger.warning(
        "torch.profiler records in this process, and the ranks train in processes of their own: each writes a"
        " trace and a table of a few steps to %s (profile.enabled, profile.steps)",
        plan.config.profile.output_dir,
    )
    return replace(plan, config=override(plan.config, {"profile.enabled": True}, "torch.profiler around fit"))


def _save(job: RankPayload, path: Path) -> None:
    what = "the task, which takes the model and the data in memory to the ranks"
    with needs_room(what, path.parent):
        _save_path(path.parent)
        reserve(path.parent)
    try:
        save_task(job, path)
    except Exception as error:
        if lacks_room(error):
            path.unlink()
            raise no_room(what, path.parent, measure_task(job)) from error
        raise UserError(
            f"cannot pickle the Trainer's arguments for the ranks: {type(error).__name__}: {error}",
            field="model, loaders, loss_fn, callbacks",
            got=_unpicklable(job.task),
            remedy="Give a function that builds the model instead of a model that cannot be pickled, such as"
            " one with parametrizations; open files, locks and connections where they are used, on the ranks;"
            " or start the script with torchrun, which pickles nothing",
        ) from error


def _unpicklable(task: Any) -> str | None:
    """The part of `task` that cannot be pickled, as the caller would name it."""
    arguments = {"train_data": "train_loader", "val_data": "val_loader"}
    for name, value in vars(task).items():
        found = find_unpicklable(value, arguments.get(name, name))
        if found is not None:
            place, part = found
            return f"{place}, a {type(part).__module__}.{type(part).__qualname__}"
    return None


def _save_path(folder: Path) -> None:
    write_private(folder / "sys_path.json", json.dumps(search_path(sys.path)).encode())
