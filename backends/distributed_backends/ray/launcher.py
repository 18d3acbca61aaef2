"""RayLauncher: a run of Ray Train whose workers are the ranks."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError
from ray.train import ScalingConfig, TrainingFailedError

from distributed.checkpoint.run_directory import owned_directory
from distributed.config import DistributedConfig
from distributed.errors import UserError, WorkerError
from distributed.interfaces.launcher import Launcher, RankCommand
from distributed.interfaces.plan import RunPlan
from distributed.operations.tuning.trial_channel import TRIAL
from distributed.registry.catalog import load_target
from distributed.resilience.elastic import write_restarts
from distributed.resilience.failure_reports import FailureReport, find_cause, is_second_hand
from distributed.resilience.preemption import catch_signals
from distributed.system.processes import environment
from distributed_backends.ray.cluster import (
    address_of,
    check_resources,
    connected,
    is_local,
    needs_of,
    num_gpus,
)
from distributed_backends.ray.figures_callback import in_trial
from distributed_backends.ray.output import Relay
from distributed_backends.ray.run_files import names_in, pack, remove_everywhere, unpack
from distributed_backends.ray.section import RaySection
from distributed_backends.ray.worker import REPORT

_POLL = "0.2"
"""Seconds between Ray Train's polls of its workers. A worker's next report waits for the poll."""
_SECOND_LOOK = 30.0
"""Longer than the 20 s for which Ray Train's reservations are kept as they are."""
_DATASETS, _CLEANER = "DatasetsCallback", "PlacementGroupCleanerCallback"
"""Callbacks of Ray Train that start a process of their own: for datasets that no rank reads, and to release
the resources of a killed controller. Outside a trial, they are released with the driver, and the cleaner asks
the cluster that was started last on this host: with two clusters, it ends a healthy run of the other."""


class RayLauncher(Launcher):
    """Start the ranks as workers of one Ray Train run, on the cluster that ``ray.address`` names.

    A single rank of a Tune trial trains in the trial, which holds the resources for it. A trial of
    `DistributedTuner` holds them for all its ranks, which it starts as every other backend does.
    """

    def num_gpus(self, config: DistributedConfig) -> int | None:
        if _holds_all():
            return None
        if in_trial() and (config.num_ranks or 1) == 1:
            return None
        if address_of(RaySection.of(config)) is None and not ray.is_initialized():
            return None
        with connected(RaySection.of(config), 1):
            return num_gpus(or_to_come=config.num_ranks is not None)

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        if plan.world_size == 1 and in_trial():
            _run_here(command)
            return
        if _holds_all():
            local: Launcher = load_target("distributed.launch.local_launcher:LocalLauncher")()
            local.run(plan, command)
            return
        num_cpus = math.ceil(plan.world_size * RaySection.of(plan.config).num_cpus_per_rank)
        with connected(RaySection.of(plan.config), num_cpus):
            check_resources(plan)
            with owned_directory(plan, command) if plan.counts else nullcontext(command) as lent_command:
                _run_workers(plan, lent_command)


def _run_workers(plan: RunPlan, command: RankCommand) -> None:
    heeds = plan.config.heeds_signals
    try:
        with Relay(heeds) as relay, catch_signals(relay.ask) if heeds else nullcontext():
            _fit(plan, command, relay)
            write_restarts(command.folder, ["Ray restarted all ranks"] * (relay.num_starts - 1))
    finally:
        remove_everywhere(command.folder.name)


def _holds_all() -> bool:
    return TRIAL in os.environ


def _run_here(command: RankCommand) -> None:
    path = list(sys.path)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    nodes = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "DISTRIBUTED_RUN_DIR": str(command.folder)}
    try:
        with environment({**command.env, **place, **nodes}):
            status = load_target(command.target)(command.folder)
    finally:
        sys.path[:] = path
    if status:
        report = FailureReport.read(command.folder, 0)
        assert report is not None
        raise report.to_error()


def _fit(plan: RunPlan, command: RankCommand, relay: Relay) -> None:
    trainer = _trainer(plan, command, relay)
    callbacks, idle = trainer._create_default_callbacks, {_DATASETS} if in_trial() else {_DATASETS, _CLEANER}
    trainer._create_default_callbacks = lambda: [c for c in callbacks() if type(c).__name__ not in idle]
    variables = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        # A rank prints and logs as under every other backend.
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
        # A separate process, whose warnings only reach ranks that poll Ray; ours catch signals.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0"),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _POLL),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(
            RaySection.of(plan.config).start_timeout / _looks(plan)
        ),
    }
    try:
        with environment(variables), _interruptible(trainer):
            result = trainer.fit()
    except TrainingFailedError as error:
        relay.close()
        found = FailureReport.read(command.folder)
        if found is not None:
            raise found.to_error() from None
        _raise(error, plan, relay)
    unpack(result.return_value or {}, command.folder)


def _trainer(plan: RunPlan, command: RankCommand, relay: Relay) -> Any:
    from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    section = RaySection.of(plan.config)
    callbacks: list[Any] = []
    if in_trial():
        from ray.tune.integration.ray_train import TuneReportCallback

        callbacks.append(TuneReportCallback())
    return DataParallelTrainer(
        _rank(_order(plan, command, relay)),
        scaling_config=ScalingConfig(
            num_workers=_num_workers(plan),
            use_gpu=plan.device == "cuda",
            resources_per_worker=needs_of(plan),
            placement_strategy="PACK" if plan.config.num_nodes == 1 else "SPREAD",
        ),
        run_config=RunConfig(  # type: ignore[arg-type]
            name=command.folder.name,
            storage_path=section.storage_path or str(command.folder / "ray"),
            failure_config=FailureConfig(
                max_failures=plan.config.max_restarts, controller_failure_limit=_looks(plan) - 1
            ),
            callbacks=callbacks,
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )


def _looks(plan: RunPlan) -> int:
    """Number of Ray's attempts within `start_timeout`: workers that die in starting and missing resources
    count equally. An elastic run checks the resources again, because Ray may not have detected a lost
    node yet, and waits for it."""
    often = len(plan.counts) > 1
    enough = math.ceil(RaySection.of(plan.config).start_timeout / _SECOND_LOOK) if often else 1
    return max(plan.config.max_restarts + 1, enough)


def _num_workers(plan: RunPlan) -> Any:
    """The plan's number of ranks, or the range of an elastic run."""
    return (plan.counts[-1], plan.world_size) if len(plan.counts) > 1 else plan.world_size


def _order(plan: RunPlan, command: RankCommand, relay: Relay) -> dict[str, Any]:
    """A worker's parameters as plain values, because it cannot import our code yet."""
    here = ray.get_runtime_context().get_node_id() if is_local() else None
    others = here is None or any(node["Alive"] and node["NodeID"] != here for node in ray.nodes())
    return {
        "folder": str(command.folder),
        "node": here,
        "cwd": os.getcwd(),
        "path": [entry or os.getcwd() for entry in sys.path],
        "env": dict(command.env),
        "target": command.target,
        # In a list, so that it stays a reference: a worker in this folder needs none of it. Nodes that
        # join later request it from this one.
        "files": [ray.put(pack(command.folder))] if others else None,
        "names": names_in(command.folder),
        "queue": relay.queue,
        "orders": relay.orders,
    }


def _rank(order: dict[str, Any]) -> Callable[[], Any]:
    def rank() -> Any:
        # Pickled by value, because our code may not be importable yet.
        import sys

        sys.path.extend(entry for entry in order["path"] if entry not in sys.path)
        from distributed_backends.ray.worker import run_rank

        return run_rank(order)

    return rank


@contextmanager
def _interruptible(trainer: Any) -> Iterator[None]:
    """Ctrl-C ends the run and raises KeyboardInterrupt, where Ray Train would exit with 0."""
    found: list[Any] = []
    trainer._register_sigint_handler = found.append
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except KeyboardInterrupt:
        if found:
            with suppress(RayError):  # it dies in answering
                ray.get(found[0].abort.remote(), timeout=10.0)
        raise
    finally:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) != before:
            signal.signal(signal.SIGINT, before)


# -- failures ------------------------------------------------------------------------


def _raise(error: Any, plan: RunPlan, relay: Relay) -> NoReturn:
    """Raise the first failed rank's own error instead of Ray's."""
    failures = getattr(error, "worker_failures", None)
    if not failures:
        raise _not_started(error, plan) from None
    reports = [_report(rank, failure, relay) for rank, failure in failures.items()]
    raise find_cause(reports).to_error(report.rank for report in reports) from None


def _report(rank: int, failure: Exception, relay: Relay) -> FailureReport:
    _, found, text = str(failure).partition(REPORT)
    if found:
        return FailureReport.from_json(text)
    host, pid = relay.places.get(rank, ("unknown host", 0))
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
    reason, guessed, _ = lines[-1].partition(" Some common causes")
    hint = "; it was killed, or the host ran out of memory" if guessed else ""
    what = f"is lost: {reason.rstrip('. ')}{hint}"
    second_hand = is_second_hand(failure)
    return FailureReport(rank, type(failure).__name__, what, host, pid, second_hand=second_hand)


def _not_started(error: Any, plan: RunPlan) -> Exception:
    cause = getattr(error, "controller_failure", error)
    if type(cause).__name__ not in ("WorkerGroupStartupTimeoutError", "InsufficientClusterResourcesError"):
        return WorkerError(
            f"Ray Train could not run the ranks: {cause}",
            rank=-1,
            host=socket.gethostname(),
            exc_type=type(cause).__name__,
        )
    free = ray.available_resources()
    has = ", ".join(f"{a:g} {n}" for n, a in sorted(free.items()) if ":" not in n and "memory" not in n)
    each = ", ".join(f"{amount:g} {name}" for name, amount in needs_of(plan).items())
    return UserError(
        f"the Ray cluster had no resources for {plan.world_size} ranks of {each} each within"
        f" {RaySection.of(plan.config).start_timeout:g} s: free are {has or 'no CPUs'}",
        field="ray.start_timeout",
        got=RaySection.of(plan.config).start_timeout,
        remedy="Raise ray.start_timeout, request less, or end other jobs; in a Tune trial let the trial"
        " itself hold no CPU: tune.with_resources(train, {'memory': 1})",
    )
