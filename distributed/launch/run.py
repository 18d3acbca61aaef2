"""Start ranks or join those that a launcher started (hop 5)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distributed.communication.rendezvous import Rendezvous
from distributed.communication.task_file import save_task, write_private
from distributed.errors import UserError
from distributed.interfaces.history import History
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.task import Progress, Task
from distributed.launch.rank_process import RankJob, run_here
from distributed.launch.supervisor import Supervisor
from distributed.planner.resolve import rescale
from distributed.registry.catalog import load_target
from distributed.resilience.elastic import Alone, Elastic, Membership, claim_directory, restarts_of
from distributed.resilience.host_heartbeat import HostWatch
from distributed.resilience.rank_monitor import Limits, Watch
from distributed.system.addresses import is_loopback, loopback_interface
from distributed.training.seeding import isolated_rng

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.planner.resolve import RunPlan

__all__ = ["LocalLauncher", "Outcome", "Rendezvous", "rank_envs", "run", "run_script"]

# A rank imports from where its caller did: neither more (a file in the working folder may be
# called like a module) nor less (unpickling the task imports the caller's modules).
_BOOT = (
    "import json, os, sys; "
    "sys.path[:] = json.load(open(os.path.join(os.environ['DISTRIBUTED_RUN_DIR'], 'sys_path.json'))); "
    "from distributed.launch import rank_process; rank_process.leave(rank_process.main())"
)
_RANK = [sys.executable, "-P", "-c", _BOOT]


@dataclass
class Outcome:
    """What a run leaves to the caller.

    Attributes:
        history: the record.
        progress: where the next `fit` goes on.
        state: folder of the final state when ranks were started; None when it is in this
            process's own objects.
        run_state: scaler and the like, when the run was in this process.
        loop: the loop, when the run was in this process.
    """

    history: History
    progress: Progress
    state: TemporaryDirectory[str] | None = None
    run_state: dict[str, Any] | None = None
    loop: Any = None


def run(
    plan: RunPlan, task: Task, tracker_contexts: Mapping[str, Any], launcher: Launcher | None = None
) -> Outcome:
    """Run `task` by `plan`: here, as one of a launcher's ranks, or in ranks started now.

    Args:
        plan: what was decided.
        task: the user's objects.
        tracker_contexts: tracker name -> what its `capture` returned here.
        launcher: starts the ranks instead of the backend's own launcher.

    Raises:
        UserError: a mistake that only a rank could see.
        WorkerError: a rank failed.
    """
    job = RankJob(plan, task, dict(tracker_contexts))
    if plan.mode != "spawn":
        with isolated_rng() if plan.mode == "in-process" else nullcontext():
            loop = run_here(job)
            left = loop.leftover_state()
        return Outcome(loop.history, loop.progress, run_state=left, loop=loop)
    folder = TemporaryDirectory(prefix="distributed-")
    try:
        path = Path(folder.name)
        job.task = load_target(plan.spec.objects)().pack(task)
        _save(job, path / "task.bin")
        starter: Launcher = launcher or load_target(plan.spec.launcher)()
        starter.run(plan, RankCommand(_RANK, path))
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
        (path / "task.bin").unlink()
        history = History.from_dict({**result["history"], "restarts": restarts_of(path)})
        return Outcome(history, Progress(**result["progress"]), folder)
    except BaseException:
        folder.cleanup()
        raise


def run_script(config: DistributedConfig, script: str, args: Sequence[str]) -> int:
    """Start `script` itself on every rank, as torchrun does, for scripts without our Trainer.

    Raises:
        WorkerError: a rank failed.
    """
    from distributed.planner.resolve import Facts, Resources, resolve, visible_gpus
    from distributed.registry.catalog import get_catalog

    plan = resolve(
        # What such a script does about checkpoints and signals is its own.
        config.with_values({"launch": "spawn", "checkpoint_dir": None}, "per-rank"),
        get_catalog(),
        Facts(),
        Resources(visible_gpus() if config.device != "cpu" else 0),
    )
    with TemporaryDirectory(prefix="distributed-") as folder:
        _save_path(Path(folder))
        LocalLauncher().run(plan, RankCommand([*_RANK, script, *args], Path(folder)))
    return 0


class LocalLauncher(Launcher):
    """Starts this node's ranks as processes that meet in a store which it serves, and again when the
    run is elastic."""

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        if plan.counts:
            Elastic(plan, command, partial(_supervisor, command), _members(plan), rescale).run()
            return
        with ExitStack() as stack:
            host, port = _endpoint(plan)
            if plan.node_rank == 0:
                port = stack.enter_context(Rendezvous(host, port, plan.world_size)).port
            _supervisor(command, plan, host, port).run()


def _supervisor(command: RankCommand, plan: RunPlan, host: str, port: int) -> Supervisor:
    envs = rank_envs(plan, command, host, port)
    hosts = None
    if plan.num_nodes > 1:
        hosts = HostWatch((host, port), plan.node_rank, tuple(envs), plan.config.host_timeout)
    watch = Watch(command.folder, Limits.of(plan), hosts)
    return Supervisor(command.argv, envs, command.folder, watch, plan.config.heeds_signals)


def _members(plan: RunPlan) -> Membership:
    if plan.num_nodes == 1:
        claim_directory(plan)
        return Alone(list(plan.counts))
    from distributed.resilience.elastic_hosts import Hosts

    return Hosts(plan, _endpoint(plan))


def _endpoint(plan: RunPlan) -> tuple[str, int]:
    if plan.num_nodes == 1:
        return "127.0.0.1", 0
    text = plan.config.rdzv_endpoint or ""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError("not an address", field="rdzv_endpoint", got=text, allowed="HOST:PORT of node 0")
    return host, int(port)


def rank_envs(plan: RunPlan, command: RankCommand, host: str, port: int) -> dict[int, dict[str, str]]:
    """rank -> environment, for the ranks of this node."""
    first = plan.node_rank * plan.local_size
    return {first + local: _rank_env(plan, command, local, host, port) for local in range(plan.local_size)}


def _rank_env(plan: RunPlan, command: RankCommand, local: int, host: str, port: int) -> dict[str, str]:
    """The environment of one rank, in torchrun's own words."""
    threads = max(1, len(os.sched_getaffinity(0)) // plan.local_size)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, **command.env}
    if is_loopback(host):
        env = {"GLOO_SOCKET_IFNAME": loopback_interface(), **env}
    env.update(
        {
            "RANK": str(plan.node_rank * plan.local_size + local),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(plan.local_size),
            "GROUP_RANK": str(plan.node_rank),
            "GROUP_WORLD_SIZE": str(plan.num_nodes),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "DISTRIBUTED_RUN_DIR": str(command.folder),
            "PYTHONUNBUFFERED": "1",
        }
    )
    return env


def _save(job: RankJob, path: Path) -> None:
    _save_path(path.parent)
    try:
        save_task(job, path)
    except Exception as error:
        raise UserError(
            f"what was given to the Trainer cannot travel to the ranks: {type(error).__name__}: {error}",
            field="model, loaders, loss_fn, callbacks",
            remedy="Open files, locks and connections inside the dataset or factory, or start the"
            " script with torchrun, which needs nothing to travel",
        ) from error


def _save_path(folder: Path) -> None:
    search = [entry or os.getcwd() for entry in sys.path]
    write_private(folder / "sys_path.json", json.dumps(search).encode())
